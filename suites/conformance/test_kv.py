"""KV: every slot is somewhere, nowhere twice, and nothing freed is read."""

from __future__ import annotations

import pytest
from hypothesis import given

from harness.invariants import kv_1, kv_1_poison
from harness.workloads.lane import Lane
from harness.workloads.scenarios import abort_storm, mixed_flags, tiny_pool_preemption, warm_prefix
from harness.workloads.strategies import Batch
from suites.conformance.arrange import ANY_BATCH, WALK, RecordExamples, scenarios, watched
from suites.registration import suite

suite(seconds=1.1, stage="cpu", needs="cpu")


@pytest.mark.invariant("KV-1")
@given(batch=ANY_BATCH)
def test_slots(lane: Lane, batch: Batch) -> None:
    lane.grey_box()
    run = lane.run_batch(batch)
    lane.check(kv_1(run) + kv_1_poison(run))


@pytest.mark.invariant("KV-1")
def test_slots_in_scenarios(lane: Lane, record_examples: RecordExamples) -> None:
    lane.grey_box()
    for _, run in scenarios(lane):
        lane.check(kv_1(run) + kv_1_poison(run))
        record_examples(1)


@pytest.mark.invariant("KV-1")
def test_nothing_is_lost_over_many_runs(lane: Lane, record_examples: RecordExamples) -> None:
    """One engine, one scenario after the other: each begins with what the last one left."""
    lane.grey_box()
    with lane.start(page_size=4, num_pages=40, max_running=8) as engine:
        for make in (abort_storm, tiny_pool_preemption, mixed_flags, warm_prefix):
            run = engine.run(lane.fit(watched(make(WALK))).requests)
            lane.check(kv_1(run) + kv_1_poison(run))
            record_examples(1)
