"""SHAPE: drafts and emitted blocks have the agreed shape, and every slot holds an id or the placeholder."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from harness.invariants import shape_1, shape_2
from harness.workloads.lane import Lane
from harness.workloads.scenarios import ragged_eight
from harness.workloads.strategies import Batch
from suites.conformance.arrange import ANY_BATCH, WALK, RecordExamples, offering, scenarios
from suites.tiers import tiered


@pytest.mark.invariant("SHAPE-1")
@given(batch=ANY_BATCH)
def test_drafts(lane: Lane, batch: Batch) -> None:
    lane.grey_box()
    lane.check(shape_1(offering(lane.run_batch(batch), "propose")))


@pytest.mark.invariant("SHAPE-1")
@pytest.mark.parametrize("k", tiered(range(1, 7), 1, 6))
def test_drafts_of_any_length(lane: Lane, k: int) -> None:
    lane.grey_box()
    batch = replace(ragged_eight(WALK), k=k)
    lane.check(shape_1(lane.run_batch(batch)))


@pytest.mark.invariant("SHAPE-2")
@given(batch=ANY_BATCH)
def test_ids(lane: Lane, batch: Batch) -> None:
    lane.check(shape_2(lane.run_batch(batch)))


@pytest.mark.invariant("SHAPE-2")
def test_ids_in_scenarios(lane: Lane, record_examples: RecordExamples) -> None:
    for _, run in scenarios(lane):
        lane.check(shape_2(run))
        record_examples(1)
