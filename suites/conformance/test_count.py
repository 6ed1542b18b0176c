"""COUNT: what was delivered, billed and reported beside it are the same numbers."""

from __future__ import annotations

import pytest
from hypothesis import given

from harness.invariants import count_1, count_2, count_2_blocks
from harness.workloads.lane import Lane
from harness.workloads.strategies import Batch
from suites.conformance.arrange import ANY_BATCH, RecordExamples, scenarios


@pytest.mark.invariant("COUNT-1")
@given(batch=ANY_BATCH)
def test_rows_per_token(lane: Lane, batch: Batch) -> None:
    lane.check(count_1(lane.run_batch(batch)))


@pytest.mark.invariant("COUNT-1")
def test_rows_per_token_in_scenarios(lane: Lane, record_examples: RecordExamples) -> None:
    for _, run in scenarios(lane):
        lane.check(count_1(run))
        record_examples(1)


@pytest.mark.invariant("COUNT-2")
@given(batch=ANY_BATCH)
def test_counters(lane: Lane, batch: Batch) -> None:
    lane.grey_box()
    run = lane.run_batch(batch)
    lane.check(count_2(run) + count_2_blocks(run))


@pytest.mark.invariant("COUNT-2")
def test_counters_in_scenarios(lane: Lane, record_examples: RecordExamples) -> None:
    lane.grey_box()
    for _, run in scenarios(lane):
        lane.check(count_2(run) + count_2_blocks(run))
        record_examples(1)
