"""SCHED: requests do not disturb one another, and all of them end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from harness.contract import Request, SamplingParams
from harness.invariants import kv_1, sched_1, sched_2, sched_2_first, sched_3
from harness.workloads.lane import Lane, step_bound
from harness.workloads.scenarios import abort_storm, mixed_flags, plain, ragged_eight, tiny_pool_preemption
from harness.workloads.strategies import Batch, tight_pool
from suites.conformance.arrange import ANY_BATCH, ROWS, WALK, RecordExamples, alone, scenarios
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=6.9, stage="cpu", needs="cpu")


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


@pytest.mark.invariant("SCHED-1")
def test_cancelled_and_asked_again(lane: Lane) -> None:
    """A long prompt is cancelled between its chunks, and asked for again by others that begin like it: what was left of
    it, computed or not, must not be taken for theirs. Their tokens tell which history they have seen."""
    lane.needs("abort_step")
    trunk = ROWS.prompt(30, 3)
    again = tuple(
        Request(
            request_id=f"again{step}",
            prompt_token_ids=trunk[: 30 - 2 * step],
            sampling=SamplingParams(max_new_tokens=8),
            arrival_step=9 * step + step,
        )
        for step in (1, 2, 3)
    )
    cancelled = tuple(
        replace(
            request,
            request_id=f"cancelled{step}",
            prompt_token_ids=trunk[:-1] + trunk[:step],
            arrival_step=9 * step,
            abort_step=9 * step + step,
        )
        for step, request in enumerate(again, start=1)
    )
    changes = (("chunk_size", 7), ("page_size", 4))
    calm = lane.run_batch(Batch(again, k=3, changes=changes), family=ROWS.family)
    lane.check(sched_1(lane.run_batch(Batch(cancelled + again, k=3, changes=changes), family=ROWS.family), calm))


@pytest.mark.invariant("SCHED-1", "SCHED-2")
def test_ends_while_a_step_is_on_its_way(lane: Lane) -> None:
    """Under overlap scheduling the next step has begun when a request is seen to stop or is aborted: what comes of that
    is dropped, it is nobody else's, and the request is not launched again."""
    lane.needs("stop_token_ids", "abort_step")
    requests = list(plain(WALK, (3, 7, 2, 5, 9, 4), (16, 16, 16, 16, 16, 16)))
    for place, end in ((0, 5), (3, 9)):
        stop = WALK.continue_(requests[place].prompt_token_ids, end)[-1:]
        sampling = replace(requests[place].sampling, stop_token_ids=stop)
        requests[place] = replace(requests[place], sampling=sampling)
    calm = tuple(requests)
    requests[1] = replace(requests[1], abort_step=3)
    run = lane.run(requests, overlap=True)
    lane.check(sched_2(run, step_bound(requests)) + sched_1(run, lane.run(calm)))


@pytest.mark.invariant("SCHED-2", "KV-1")
def test_cancels_again_and_again(lane: Lane) -> None:
    """On one engine as many requests as it runs at once are cancelled, time after time and in every phase of their
    lives: whoever comes after them is served as soon as the first was."""
    lane.grey_box()
    guests = plain(WALK, (13, 14), (9, 9))
    with lane.start(page_size=4, chunk_size=4, max_running=2) as engine:
        runs = [engine.run(guests, max_steps=step_bound(guests))]
        for step in range(6):
            crowd = tuple(replace(request, abort_step=step) for request in plain(WALK, (23, 22), (9, 9), seed=step))
            run = engine.run(crowd, max_steps=step_bound(crowd))
            lane.check(kv_1(run) + sched_2(run, step_bound(crowd)))
        runs.append(engine.run(guests, max_steps=step_bound(guests)))
    lane.check(sched_2(runs[1], len(runs[0].steps)))


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


@pytest.mark.invariant("SCHED-3")
def test_every_flag_while_others_come_and_go(lane: Lane) -> None:
    """Few at once in padded batches, each with another cap: the members of a batch change, and its size does not."""
    batch = mixed_flags(WALK)
    changes = (("batch_buckets", (4,)), ("chunk_size", 16), ("max_running", 4), ("page_size", 4))
    changing = replace(batch, changes=changes)
    run = lane.run_batch(changing)
    lane.check(sched_3(run, {r.request_id: alone(lane, batch, r) for r in batch.requests}))


@pytest.mark.invariant("SCHED-2")
def test_a_newcomer_does_not_wait_for_those_that_run(lane: Lane) -> None:
    lane.grey_box()
    running, newcomer = plain(WALK, (5, 4), (40, 3))
    run = lane.run((running, replace(newcomer, arrival_step=4)))
    lane.check(sched_2_first(run, 4))


@pytest.mark.invariant("SCHED-1")
def test_preempted_where_a_twin_went_on(lane: Lane, record_examples: RecordExamples) -> None:
    """All that a request has, its last token included, may be in the prefix cache when it is resumed: a twin, which has
    arrived before it, is ahead. Pages of one token, so that every length is a page's border."""
    first, other = plain(WALK, (4, 6), (24, 24))
    twin = replace(first, request_id="twin", arrival_step=3)
    requests = (first, other, twin)
    right = lane.run_batch(Batch(requests, 3, changes=(("page_size", 1),)))
    preempted = 0
    for slack in range(0, 24, 6):
        pool = tight_pool(requests, 1, 3, slack)
        run = lane.run_batch(Batch(requests, 3, changes=(("page_size", 1), ("num_pages", pool))))
        lane.check(sched_1(run, right))
        preempted += sum("twin" in owner for step in run.steps for owner in step.preempted)
        record_examples(1)
    if lane.capabilities.grey_box:
        assert preempted, "the pool is too large: the twin was not preempted"
