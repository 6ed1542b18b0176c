"""CONF-1, cell by cell: every feature works with every drafter, or is declined with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.contract import Refused, SamplingParams
from harness.workloads.features import FEATURES, SAMPLING, Feature, Outcome
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.matrix import heeded, row
from suites.conformance.arrange import RecordExamples
from suites.registration import suite

suite(seconds=4.6, stage="cpu", needs="cpu")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "matrix.md"


@pytest.mark.invariant("CONF-1")
@pytest.mark.composite
def test_every_feature_works_or_is_declined(lane: Lane, record_examples: RecordExamples) -> None:
    cells = row(lane)
    record_examples(len(cells))
    wrong = {name: cell.why for name, cell in cells.items() if cell.status == "fail"}
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
    assert set(cells) == set(FEATURES)


@pytest.mark.drafters("none")
@pytest.mark.parametrize("feature", [f for f in SAMPLING if f.name != "seed"], ids=lambda feature: feature.name)
def test_an_engine_that_ignores_a_feature_is_seen(lane: Lane, feature: Feature) -> None:
    """The same request without the field. (A seed that is ignored is for LAW-3 to find.)"""
    asks, neighbour = feature.requests()
    field = feature.name.removeprefix("greedy_")
    plain = {field: getattr(SamplingParams(), field)}
    ignoring = replace(asks, sampling=replace(asks.sampling, **plain))
    try:
        run = lane.run([ignoring, neighbour], family=feature.family)
    except Refused:
        return  # declined for what else the request asks: nothing was ignored
    assert not heeded(feature, Outcome(run, feature.plain, feature.words))


def test_the_published_page_has_every_cell() -> None:
    lines = [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    assert head == ["feature", *LANES]
    assert [cells[0] for cells in rows] == list(FEATURES)
    assert all(cell.startswith(("pass", "refused")) for cells in rows for cell in cells[1:])
