"""The joint law of emitted blocks, integrated exactly over the random numbers that verification takes as arguments.

Every law in use has a small denominator, so every threshold that a right verifier compares a coin with lies on a grid.
A coin is set just above and just below each grid line, each point with the weight of half a cell: the sum over all
points is the integral, as long as no threshold is off its line by more than `NUDGE`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from reference_engine.verification.base import Verdict

NUDGE = 1e-6
TOLERANCE = 1e-6
Tokens = tuple[int, ...]
Law = tuple[float, ...]
Laws = Callable[[Tokens], Law]
"""Path of tokens -> V probabilities of the token after it."""


def coin_points(cells: int) -> torch.Tensor:
    """[2 * cells] float64: just inside both ends of every cell of a grid over [0, 1)."""
    lines = torch.arange(cells, dtype=torch.float64) / cells
    return torch.cat([lines + NUDGE, lines + 1 / cells - NUDGE])


def all_coins(cells: Sequence[int]) -> torch.Tensor:
    """[points, len(cells)]: every combination of the points of each coin; all have the same weight."""
    points = torch.cartesian_prod(*(coin_points(count) for count in cells))
    return points.reshape(-1, len(cells))


def seeded_laws(vocab: int, parts: int, seed: int, *, sparse: bool = True) -> Laws:
    """A law for every path: multiples of 1 / parts. One in two has zeros, or none with `sparse=False`; where `parts`
    is below `vocab` all have."""

    @cache
    def law(path: Tokens) -> Law:
        rng = random.Random(f"{vocab}/{parts}/{seed}/{path}")
        thin = parts < vocab or (sparse and rng.random() < 0.5)
        counts = [0 if thin else 1] * vocab
        while sum(counts) < parts:
            counts[rng.randrange(vocab)] += 1
        return tuple(count / parts for count in counts)

    return law


def sequences(vocab: int, length: int) -> Iterator[Tokens]:
    return itertools.product(range(vocab), repeat=length)


def target_law(laws: Laws, vocab: int, length: int) -> dict[Tokens, float]:
    """Joint law of the next `length` tokens."""
    return {tokens: chance(laws, (), tokens) for tokens in sequences(vocab, length)}


def chance(laws: Laws, path: Tokens, tokens: Tokens) -> float:
    """Probability that `tokens` follow `path`."""
    product = 1.0
    for place, token in enumerate(tokens):
        product *= laws(path + tokens[:place])[token]
    return product


def completed(blocks: dict[Tokens, float], laws: Laws, vocab: int, length: int) -> dict[Tokens, float]:
    """The law of `length` tokens when every emitted block is followed by tokens of the target's law."""
    whole = dict.fromkeys(sequences(vocab, length), 0.0)
    for block, mass in blocks.items():
        for rest in sequences(vocab, length - len(block)):
            whole[block + rest] += mass * chance(laws, block, rest)
    return whole


@dataclass(frozen=True)
class Tally:
    """Blocks and their masses."""

    masses: dict[Tokens, float]

    @classmethod
    def of(cls, verdict: Verdict) -> Tally:
        """Rows of one verdict are equally likely. Also checks what every verdict must be."""
        check_verdict(verdict)
        base = int(verdict.emitted.max()) + 2
        digits = base ** torch.arange(verdict.emitted.shape[1])
        codes, counts = torch.unique(((verdict.emitted + 1) * digits).sum(1), return_counts=True)
        rows = (codes[:, None] // digits % base - 1).tolist()
        blocks = [tuple(token for token in row if token >= 0) for row in rows]
        return cls(dict(zip(blocks, (counts / counts.sum()).tolist(), strict=True)))


def check_verdict(verdict: Verdict) -> None:
    """`accept_lens` tokens, then -1; the path has as many nodes and starts at the root."""
    width = verdict.emitted.shape[1]
    kept = torch.arange(width) < verdict.accept_lens[:, None]
    assert ((verdict.emitted >= 0) == kept).all()
    assert ((verdict.accept_index >= 0) == kept).all()
    assert (verdict.accept_index[~kept] == -1).all()
    assert (verdict.accept_index[:, 0] == 0).all()


def distance(got: dict[Tokens, float], right: dict[Tokens, float]) -> float:
    """The largest difference of any probability."""
    return max(abs(got.get(tokens, 0.0) - right.get(tokens, 0.0)) for tokens in got.keys() | right.keys())
