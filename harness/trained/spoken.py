"""Windows in which the target itself goes on: what a drafter is asked to foresee in an engine, right or wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from harness.contract import Request, SamplingParams
from harness.engines import engine_factory
from harness.trained import checkpoints
from harness.trained.plan import Plan

STEPS_AT_ONCE = 16
"""Training steps whose windows are made in one go."""


def half_spoken(plan: Plan, root: Path) -> Callable[[int], Tensor]:
    """The windows of a plan's steps; in every other of them the target that is stored below `root` goes on greedily."""

    @lru_cache(maxsize=1)
    def block(number: int) -> Tensor:
        steps = range(number * STEPS_AT_ONCE, min((number + 1) * STEPS_AT_ONCE, plan.steps))
        windows = torch.stack([plan.windows(step) for step in steps])
        windows[:, ::2] = continued(windows[:, ::2].flatten(0, 1), f"{plan.seed}-{number}", root).view_as(
            windows[:, ::2]
        )
        return windows

    return lambda step: block(step // STEPS_AT_ONCE)[step % STEPS_AT_ONCE]


def continued(windows: Tensor, seed: str, root: Path) -> Tensor:
    """Windows [n, length] of ids with their beginnings kept, of a length between a sixteenth and three eighths, and the
    target's greedy choice behind them."""
    rng, length = random.Random(seed), windows.shape[1]
    asked = []
    for index, ids in enumerate(windows.tolist()):
        kept = rng.randint(max(length // 16, 1), 3 * length // 8)
        sampling = SamplingParams(max_new_tokens=length - kept, ignore_eos=True)
        asked.append(Request(request_id=str(index), prompt_token_ids=tuple(ids[:kept]), sampling=sampling))
    engine = engine_factory("reference").start(checkpoints.setup(None, root=root, max_running=len(asked)))
    try:
        run = engine.run(asked)
    finally:
        engine.close()
    said = {done.request_id: (*done.prompt_token_ids, *done.token_ids) for done in run.completions}
    return torch.tensor([said[request.request_id] for request in asked])
