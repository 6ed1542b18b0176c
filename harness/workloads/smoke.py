"""The least that an engine must do: one request, alone, without flags."""

from __future__ import annotations

from pathlib import Path

from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.scenarios import plain

NEW_TOKENS = 8


def smoke(lane_name: str, checkpoints: Path) -> bool:
    """Whether the reference engine, with the drafter of that lane, continues one prompt as its target would."""
    lane = Lane("reference", LANES[lane_name], checkpoints)
    requests = plain(vocabulary("walk"), (5,), (NEW_TOKENS,))
    (done,) = lane.run(requests).completions
    return done.token_ids == lane.target().greedy(requests[0].prompt_token_ids, NEW_TOKENS)
