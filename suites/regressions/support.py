"""What the regressions share: requests whose hidden rows name their owner, and runs that are never answered from a
cache, since the engine is patched in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from harness.contract import Refused, Request, Run, SamplingParams
from harness.invariants import Violation, alias_1
from harness.known_answer.census import CensusTarget
from harness.workloads.lane import Lane

FAST = ("STANDALONE", "EAGLE", "EAGLE3", "MTP", "EAGLE-tree")
"""Enough to see each bug in every kind of drafter; `--tier full` takes them all."""
DRAFTERS = (*FAST, "MEDUSA", "FROZEN_KV_MTP", "DFLASH")
FAMILY = "census"
"""Tokens come in one alphabet per request, and a hidden row tells its token and so its owner."""

PROMPT_LENS = (3, 9, 5, 2)


def long_enough(lane: Lane, caps: Sequence[int]) -> list[int]:
    """The caps, or for a drafter that guesses, and so is right less often, three times as much."""
    return [3 * cap if lane.drafter(FAMILY).guesses else cap for cap in caps]


def census(lane: Lane) -> CensusTarget:
    target = lane.target(FAMILY)
    assert isinstance(target, CensusTarget)
    return target


def asking(lane: Lane, caps: Sequence[int], *, return_hidden_states: bool = True, **fields: Any) -> tuple[Request, ...]:
    """Requests r0, r1, ... with `caps[i]` new tokens; up to four have an alphabet of their own, ragged prompts and,
    since their drafts fail at different places, ragged accept lengths."""
    return tuple(
        Request(
            request_id=f"r{i}",
            prompt_token_ids=census(lane).prompt(PROMPT_LENS[i % 4] + i // 4, i, owner=i),
            sampling=SamplingParams(max_new_tokens=cap, **fields),
            return_hidden_states=return_hidden_states,
        )
        for i, cap in enumerate(caps)
    )


def observe(lane: Lane, requests: Sequence[Request], **setup: Any) -> Run:
    """Run on a fresh engine."""
    with lane.start(**{"family": FAMILY, **setup}) as engine:
        return engine.run(requests, max_steps=400)


def crash(lane: Lane, requests: Sequence[Request], **setup: Any) -> str | None:
    """How the engine crashed, or None. To decline a request is no crash."""
    try:
        observe(lane, requests, **setup)
    except Refused:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def misattributed(lane: Lane, run: Run) -> list[Violation]:
    """ALIAS-1, with what the rows say about themselves."""
    target = census(lane)

    def name_row(row: torch.Tensor) -> str:
        reading = target.decode_row(row, 0)
        return f"token {reading.token} of alphabet {reading.owner}"

    return alias_1(run, target.hidden_rows, name_row)


def owners(violations: Iterable[Violation]) -> set[str]:
    """The requests that are at fault."""
    return {violation.request_id for violation in violations if violation.request_id is not None}
