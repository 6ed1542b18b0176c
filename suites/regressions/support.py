"""What the regressions share: requests whose hidden rows name their owner, and runs that are never answered from a
cache, since the engine is patched in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from harness.contract import Refused, Request, Run, SamplingParams
from harness.invariants import Violation, alias_1
from harness.known_answer.census import CensusTarget
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES, DrafterLane

FAST = ("EAGLE3", "EAGLE-tree", "NGRAM", "MEDUSA")
"""One drafter of each kind: a model that drafts a chain (and reads auxiliary states), one that grows a tree, one that
has no checkpoint, and one that drafts all at once and has to guess."""
DRAFTERS = (*FAST, "STANDALONE", "EAGLE", "MTP", "EXTRACT", "FROZEN_KV_MTP", "DFLASH")

PROMPT_LENS = (3, 9, 5, 2)


def lanes(wanted: Callable[[DrafterLane], bool] = lambda _: True) -> list[Any]:
    """Parameters of the `drafter` fixture: the drafters that are `wanted`, of which the fast tier takes `FAST`."""
    names = [name for name in DRAFTERS if wanted(LANES[name])]
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in names]


def family_of(lane: Lane) -> str:
    """Tokens come in one alphabet per request, and a hidden row tells its token and so its owner. A drafter that has
    only the text to go by needs one that repeats itself."""
    return "census-stutter" if lane.spec.without_checkpoint else "census"


def census(lane: Lane) -> CensusTarget:
    target = lane.target(family_of(lane))
    assert isinstance(target, CensusTarget)
    return target


def errs(lane: Lane) -> bool:
    """Whether no family holds a drafter of this kind that is right every time."""
    return not lane.spec.may_equal_target or lane.drafter(family_of(lane)).guesses


def long_enough(lane: Lane, caps: Sequence[int]) -> list[int]:
    """The caps, or for a drafter that is right less often, three times as many tokens."""
    return [3 * cap if errs(lane) else cap for cap in caps]


def asking(lane: Lane, caps: Sequence[int], *, return_hidden_states: bool = True, **fields: Any) -> tuple[Request, ...]:
    """Requests r0, r1, ... with `caps[i]` new tokens; up to four have an alphabet of their own, ragged prompts and,
    since their drafts fail at different places, ragged accept lengths. Where drafts come from the text, prompts are
    longer."""
    longer = 12 if lane.spec.without_checkpoint else 0
    return tuple(
        Request(
            request_id=f"r{i}",
            prompt_token_ids=census(lane).prompt(PROMPT_LENS[i % 4] + i // 4 + longer, i, owner=i),
            sampling=SamplingParams(max_new_tokens=cap, **fields),
            return_hidden_states=return_hidden_states,
        )
        for i, cap in enumerate(caps)
    )


def observe(lane: Lane, requests: Sequence[Request], **setup: Any) -> Run:
    """Run on a fresh engine."""
    with lane.start(**{"family": family_of(lane), **setup}) as engine:
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
    names: dict[bytes, str] = {}

    def name_row(row: torch.Tensor) -> str:
        value = row.numpy().tobytes()
        if value not in names:
            reading = target.decode_row(row, 0)
            names[value] = f"token {reading.token} of alphabet {reading.owner}"
        return names[value]

    return alias_1(run, target.hidden_rows, name_row)


def accepting(run: Run) -> set[str]:
    """The requests that had a draft accepted."""
    return {done.request_id for done in run.completions if max(done.accept_lens or (1,)) > 1}


def owners(violations: Iterable[Violation]) -> set[str]:
    """The requests that are at fault."""
    return {violation.request_id for violation in violations if violation.request_id is not None}
