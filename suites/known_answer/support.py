"""Helpers of the known-answer suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from harness.known_answer import Drafter
from harness.known_answer.base import accept_lens
from harness.known_answer.dense_drafters import DenseDrafter, dense_drafter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Fault = Callable[[torch.Tensor], torch.Tensor]


def dense(drafter: Drafter, dtype: torch.dtype = torch.float64) -> DenseDrafter:
    """The dense forward pass of a drafter that reads hidden rows."""
    target = drafter.target.config, drafter.target.weights
    return dense_drafter(drafter.config, drafter.weights, target, dtype)


def dense_accept_lens(
    built: Drafter,
    prompt: Sequence[int],
    max_new_tokens: int,
    k: int,
    *,
    witness: DenseDrafter | None = None,
    fault: Fault | None = None,
    late: bool = False,
) -> tuple[int, ...]:
    """Accept lengths of a greedy request whose drafts come from `witness` (the drafter's own forward pass).

    `fault` changes the target rows that the drafter is fed; with `late` it is fed t[j] instead of t[j+1]. Rows are
    causal, so one forward pass over the whole request gives those of every step.
    """
    witness = witness or dense(built)
    rows = witness.features((*prompt, *built.target.greedy(prompt, max_new_tokens + k)))

    def draft(tokens: Sequence[int], k: int) -> tuple[int, ...]:
        fed = rows[: len(tokens) - 1]
        ids = (tokens[0], *tokens[:-1]) if late else tokens
        return witness.draft(ids, k, fault(fed) if fault and len(fed) > 1 else fed)

    return accept_lens(built.target, draft, prompt, max_new_tokens, k)
