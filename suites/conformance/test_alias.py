"""ALIAS: every row is its owner's, and nobody's result is somebody else's memory."""

from __future__ import annotations

import pytest
from hypothesis import given

from harness.invariants import Scribbler, alias_1, alias_2, alias_2_scribbled
from harness.workloads.lane import Lane
from harness.workloads.scenarios import (
    abort_storm,
    overlap_buckets,
    ragged_eight,
    short_prompts,
    tiny_pool_preemption,
    warm_prefix,
)
from harness.workloads.strategies import Batch
from suites.conformance.arrange import ROW_BATCH, ROWS, MakeBatch, RecordExamples, offering, scenarios, watched

TELLING = (ragged_eight, short_prompts, tiny_pool_preemption, warm_prefix, overlap_buckets)


@pytest.mark.invariant("ALIAS-1")
@given(batch=ROW_BATCH)
def test_rows_are_their_owners(lane: Lane, batch: Batch) -> None:
    run = lane.run_batch(batch, family=ROWS.family)
    lane.check(alias_1(run, lane.rows(ROWS.family)))


@pytest.mark.invariant("ALIAS-1")
def test_rows_are_their_owners_in_scenarios(lane: Lane, record_examples: RecordExamples) -> None:
    for _, run in scenarios(lane, ROWS, TELLING, watched):
        lane.check(alias_1(run, lane.rows(ROWS.family)))
        record_examples(1)


@pytest.mark.invariant("ALIAS-2")
@given(batch=ROW_BATCH)
def test_no_shared_memory(lane: Lane, batch: Batch) -> None:
    lane.grey_box()
    lane.check(alias_2(offering(lane.run_batch(batch, family=ROWS.family), "hidden")))


@pytest.mark.invariant("ALIAS-2")
@pytest.mark.parametrize("make", [short_prompts, tiny_pool_preemption, abort_storm])
def test_overwriting_a_result_changes_nothing_else(lane: Lane, make: MakeBatch) -> None:
    lane.grey_box()
    batch = watched(make(ROWS))
    scribbler = Scribbler()
    scribbled = lane.run_batch(batch, family=ROWS.family, on_step=scribbler)
    lane.check(alias_2_scribbled(lane.run_batch(batch, family=ROWS.family), scribbled, scribbler))
