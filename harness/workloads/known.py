"""Known-answer families on disk: written once, shared by the workers of a test session."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from harness.contract import DType
from harness.known_answer import Family, Target, family
from harness.known_answer.tokenizer import text_of
from harness.workloads.vocabulary import Vocabulary


def known_family(name: str, dtype: DType = "float32") -> Family:
    """A family and its closed forms, built once per process. A float64 engine reads the float32 checkpoint."""
    return _built(name, "bfloat16" if dtype == "bfloat16" else "float32")


_built = cache(family)


@cache
def vocabulary(name: str) -> Vocabulary:
    """The target of family `name` as workloads see it."""
    target = known_family(name).target
    return Vocabulary(
        family=name,
        vocab_size=target.vocab_size,
        eos_token_id=target.eos_token_id,
        continue_=lambda tokens, n: target.greedy(tokens, n),
        text=lambda tokens: text_of(tokens, target.vocab_size, target.eos_token_id),
        spell=getattr(target, "prompt", None),
    )


def greedy_without(target: Target, prompt: tuple[int, ...], n: int, banned: frozenset[int]) -> tuple[int, ...]:
    """The n greedy tokens after `prompt` of an engine that never takes one of `banned`."""
    tokens = list(prompt)
    for _ in range(n):
        law = target.logprobs(tokens).clone()
        law[sorted(banned)] = -torch.inf
        tokens.append(int(law.argmax()))
    return tuple(tokens[len(prompt) :])


@cache
def hidden_rows(target: Target, tokens: tuple[int, ...]) -> torch.Tensor:
    """`target.hidden_rows(tokens)`, remembered: every drafter of a target is held against the same rows."""
    return target.hidden_rows(tokens)


@dataclass(frozen=True)
class Checkpoints:
    """Families below `root`, as `root/DTYPE/NAME/target`, `.../eagle` and so on."""

    root: Path

    def directory(self, name: str, dtype: DType) -> Path:
        """Folder of a family, written on first use. Workers may race for it: whoever renames first wins."""
        stored = "bfloat16" if dtype == "bfloat16" else "float32"
        final = self.root / stored / name
        if not final.exists():
            final.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(mkdtemp(dir=final.parent, prefix=f".{name}-"))
            known_family(name, dtype).write(draft)
            try:
                draft.rename(final)
            except OSError:
                shutil.rmtree(draft)
        return final
