"""COUNT: what was delivered, billed and reported beside it are the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from harness.invariants import count_1, count_2, count_2_blocks
from harness.workloads.lane import Lane
from harness.workloads.lives import LIVES
from harness.workloads.scenarios import plain
from harness.workloads.strategies import Batch
from suites.conformance.arrange import ANY_BATCH, WALK, RecordExamples, scenarios
from suites.registration import suite

suite(seconds=5, stage="cpu", needs="cpu")


@pytest.mark.invariant("COUNT-1")
@given(batch=ANY_BATCH)
def test_rows_per_token(lane: Lane, batch: Batch) -> None:
    lane.check(count_1(lane.run_batch(batch)))


@pytest.mark.invariant("COUNT-1")
def test_rows_per_token_in_scenarios(lane: Lane, record_examples: RecordExamples) -> None:
    for _, run in scenarios(lane):
        lane.check(count_1(run))
        record_examples(1)


@pytest.mark.invariant("COUNT-1")
def test_nothing_is_billed_as_cached_without_a_cache(lane: Lane) -> None:
    requests = plain(WALK, (24, 24, 3), (4, 4, 4))
    lane.check(count_1(lane.run(requests, prefix_cache=False, page_size=4)))


@pytest.mark.invariant("COUNT-1")
def test_what_is_computed_again_is_not_billed_as_cached(lane: Lane) -> None:
    """A resumed request finds pages that it has left behind itself: its prompt was computed for it all the same."""
    lane.needs("preempt")
    requests = plain(WALK, (13, 9), (24, 24))
    actions = LIVES["preempt"](requests, 3)
    run, calm = (lane.run(requests, actions=taken, page_size=4) for taken in (actions, ()))
    lane.check(count_1(run))
    billed, right = ({done.request_id: done.usage for done in its.completions} for its in (run, calm))
    assert billed == right


@pytest.mark.invariant("COUNT-2")
@given(batch=ANY_BATCH)
def test_counters(lane: Lane, batch: Batch) -> None:
    lane.shows("counters")
    run = lane.run_batch(batch)
    lane.check(count_2(run) + count_2_blocks(run))


@pytest.mark.invariant("COUNT-2")
def test_counters_in_scenarios(lane: Lane, record_examples: RecordExamples) -> None:
    lane.shows("counters")
    for _, run in scenarios(lane):
        lane.check(count_2(run) + count_2_blocks(run))
        record_examples(1)


@pytest.mark.invariant("COUNT-2")
def test_counters_of_steps_that_came_too_late(lane: Lane) -> None:
    """Under overlap scheduling a step is on its way when its request is seen to end."""
    lane.grey_box()
    requests = plain(WALK, (3, 7, 2, 5), (16, 16, 16, 16))
    stops = tuple(
        replace(r, sampling=replace(r.sampling, stop_token_ids=WALK.continue_(r.prompt_token_ids, 5 + place)[-1:]))
        for place, r in enumerate(requests)
    )
    run = lane.run(stops, overlap=True)
    assert any(any(step.verify.discarded) for step in run.steps if step.verify is not None), "nothing came too late"
    lane.check(count_2(run) + count_2_blocks(run))
