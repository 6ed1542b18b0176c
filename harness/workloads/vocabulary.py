"""What a workload must know of the target that it is written for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True)
class Vocabulary:
    """A target as workloads see it; equal when the family is.

    `continue_(tokens, n)` gives the n tokens that greedy decoding appends, `text(tokens)` their characters.
    `spell(length, seed, owner)` writes prompts for a target that does not take any; each owner has its own tokens.
    """

    family: str
    vocab_size: int
    eos_token_id: int
    continue_: Callable[[tuple[int, ...], int], tuple[int, ...]] = field(compare=False, repr=False)
    text: Callable[[tuple[int, ...]], str] = field(compare=False, repr=False)
    spell: Callable[[int, int, int], tuple[int, ...]] | None = field(default=None, compare=False, repr=False)

    @property
    def ordinary(self) -> tuple[int, ...]:
        """Every id but EOS, the first and the last of the vocabulary included."""
        return tuple(token for token in range(self.vocab_size) if token != self.eos_token_id)

    def prompt(self, length: int, seed: int) -> tuple[int, ...]:
        """`length` ordinary tokens, the same for the same seed."""
        if self.spell is not None:
            return self.spell(length, seed, seed)
        rng = Random(f"{self.family}/{seed}")
        return tuple(rng.choice(self.ordinary) for _ in range(length))
