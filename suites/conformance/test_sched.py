"""SCHED: requests do not disturb one another, and all of them end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from harness.invariants import sched_1, sched_2, sched_3
from harness.workloads.lane import Lane, step_bound
from harness.workloads.scenarios import abort_storm, mixed_flags, ragged_eight, tiny_pool_preemption
from harness.workloads.strategies import Batch
from suites.conformance.arrange import ANY_BATCH, WALK, RecordExamples, alone, scenarios
from suites.tiers import tiered


@pytest.mark.invariant("SCHED-1")
@given(batch=ANY_BATCH)
def test_a_neighbour_that_never_was(lane: Lane, batch: Batch) -> None:
    fewer = replace(batch, requests=batch.requests[1:])
    lane.check(sched_1(lane.run_batch(batch), lane.run_batch(fewer)))


@pytest.mark.invariant("SCHED-1")
def test_aborts(lane: Lane) -> None:
    batch = abort_storm(WALK)
    calm = replace(batch, requests=tuple(replace(request, abort_step=None) for request in batch.requests))
    lane.check(sched_1(lane.run_batch(batch), lane.run_batch(calm)))


@pytest.mark.invariant("SCHED-1")
def test_preemption(lane: Lane) -> None:
    batch = tiny_pool_preemption(WALK)
    lane.check(sched_1(lane.run_batch(batch), lane.run_batch(replace(batch, changes=()))))


@pytest.mark.invariant("SCHED-1")
@pytest.mark.parametrize("step", tiered([1, 3, 6], 3))
def test_a_late_arrival(lane: Lane, step: int) -> None:
    batch = ragged_eight(WALK)
    late = tuple(replace(request, arrival_step=step * (i % 2)) for i, request in enumerate(batch.requests))
    lane.check(sched_1(lane.run_batch(replace(batch, requests=late)), lane.run_batch(batch)))


@pytest.mark.invariant("SCHED-2")
@given(batch=ANY_BATCH)
def test_everything_ends(lane: Lane, batch: Batch) -> None:
    lane.check(sched_2(lane.run_batch(batch), step_bound(batch.requests)))


@pytest.mark.invariant("SCHED-2")
def test_everything_ends_in_scenarios(lane: Lane, record_examples: RecordExamples) -> None:
    for batch, run in scenarios(lane):
        lane.check(sched_2(run, step_bound(batch.requests)))
        record_examples(1)


@pytest.mark.invariant("SCHED-3")
@given(batch=ANY_BATCH)
def test_flags_stay_with_their_request(lane: Lane, batch: Batch) -> None:
    calm = replace(batch, requests=tuple(replace(r, abort_step=None) for r in batch.requests[:3]))
    run = lane.run_batch(calm)
    lane.check(sched_3(run, {r.request_id: alone(lane, calm, r) for r in calm.requests}))


@pytest.mark.invariant("SCHED-3")
def test_every_flag_in_one_batch(lane: Lane) -> None:
    batch = mixed_flags(WALK)
    run = lane.run_batch(batch)
    lane.check(sched_3(run, {r.request_id: alone(lane, batch, r) for r in batch.requests}))
