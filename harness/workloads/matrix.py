"""The matrix drafter x feature: every cell passes, or is refused with a reason; anything else is a failure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from harness.contract import Engine, Refused
from harness.invariants import Violation
from harness.workloads.features import ASKS, FEATURES, Feature, Outcome
from harness.workloads.lane import Lane
from harness.workloads.verdicts import at_the_end


@dataclass(frozen=True, slots=True)
class Cell:
    """`why`: the reason of a refusal, or what is wrong."""

    status: Literal["pass", "refused", "fail"]
    why: str = ""


def row(lane: Lane, features: Iterable[Feature] = tuple(FEATURES.values())) -> Mapping[str, Cell]:
    """The cells of a lane by feature. Features of one set-up share an engine: what was asked of it before must not
    matter."""
    cells: dict[str, Cell] = {}
    try:
        lane.knock()
    except Refused as refusal:
        # Without the drafter there is nothing that it could be asked for.
        return {feature.name: Cell("refused", str(refusal)) for feature in features}
    for setup, group in groupby(features, lambda feature: {"family": feature.family, **feature.setup}):
        members = list(group)
        try:
            with lane.start(**setup) as engine:
                cells |= {feature.name: _cell(lane, engine, feature) for feature in members}
        except Refused as refusal:
            cells |= {feature.name: _refused(lane, feature, refusal) for feature in members}
    return cells


def _claimed(lane: Lane, feature: Feature) -> bool:
    return feature.claim is not None and feature.claim in lane.capabilities.features


def _refused(lane: Lane, feature: Feature, refusal: Refused) -> Cell:
    reason = str(refusal).strip()
    if not reason:
        return Cell("fail", "refused without a reason")
    return Cell("fail", f"claimed, and refused: {reason}") if _claimed(lane, feature) else Cell("refused", reason)


def _cell(lane: Lane, engine: Engine, feature: Feature) -> Cell:
    requests = feature.requests()
    try:
        run = engine.run(requests, actions=feature.actions)
    except Refused as refusal:
        return _refused(lane, feature, refusal)
    if feature.claim is not None and not _claimed(lane, feature):
        return Cell("fail", f"{feature.claim} is not claimed, and was not refused")
    if not heeded(feature, Outcome(run, feature.plain, feature.words)):
        return Cell("fail", f"taken, and not heeded: {run.of(ASKS).token_ids} where plain is {feature.plain}")
    calm = tuple(replace(request, abort_step=None) for request in requests)
    dtype = {name: value for name, value in feature.setup.items() if name == "dtype"}
    baseline = lane.baseline(lane.fit_requests(calm), family=feature.family, **dtype)
    found = at_the_end(lane, run, baseline, feature.family)
    return Cell("fail", _first(found)) if found else Cell("pass")


def heeded(feature: Feature, outcome: Outcome) -> bool:
    """Whether the outcome shows the feature; a request that was not answered does not."""
    try:
        return feature.heeded(outcome)
    except KeyError:
        return False


def _first(violations: list[Violation]) -> str:
    return violations[0].render().replace("\n", " ")
