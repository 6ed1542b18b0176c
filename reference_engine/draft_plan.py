"""How much is drafted after a launch, as far as the host can tell: how many tokens it emits is known on the device."""

from __future__ import annotations

from dataclasses import dataclass

from reference_engine.batch import Batch
from reference_engine.config import SpecConfig


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """`num_steps` drafting steps give `num_drafts` draft tokens a row; `limits[i]` is the most that the i-th request
    may have of them. Requests that are still prefilling get none."""

    num_steps: int
    num_drafts: int
    limits: list[int]


def plan_drafts(batch: Batch, spec: SpecConfig, num_steps: int, max_tokens: int) -> DraftPlan:
    """`num_steps` is what every request may have at most. No draft may lie behind the first `max_tokens` positions.

    Notes in each request how many columns of the proposal may hold a draft of it.
    """
    drafting = [batch.kind == "decode" or ends for ends in batch.ends_prefill or [True] * len(batch.requests)]
    if not any(drafting):
        return DraftPlan(num_steps, spec.num_drafts(num_steps), [0] * len(drafting))
    depths = []
    for request, drafts in zip(batch.requests, drafting, strict=True):
        # Every launch on its way, this one included, adds at least one token.
        room = max_tokens - request.num_tokens - request.pending_emits
        own = request.num_speculative_tokens
        depth = min(num_steps, room, num_steps if own is None else own)
        depths.append(max(depth, 0) if drafts else 0)
    steps = max(depths)
    limits = []
    for request, depth, drafts in zip(batch.requests, depths, drafting, strict=True):
        own = request.num_speculative_tokens
        limit = spec.num_drafts(steps if depth else 0)
        limits.append(limit if own is None else min(limit, own))
        if drafts:
            # The nodes that a request may have lie anywhere among those of a tree.
            request.num_drafts = limit if spec.topk > 1 else min(depth, limits[-1])
    return DraftPlan(steps, spec.num_drafts(steps), limits)
