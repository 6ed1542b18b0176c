"""Life of an engine: pausing, preempting, sleeping, reading weights again and forgetting the prefix cache change
nothing that a request can see, and nothing that its drafter earns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.contract import Run
from harness.invariants import accept_2_drift, equal_2, kv_1, sched_2, state_1
from harness.workloads.lane import Lane, step_bound
from harness.workloads.lives import LIVES, Life, lives, one_after_another
from harness.workloads.scenarios import abort_storm, ragged_five, tiny_pool_preemption
from harness.workloads.strategies import Batch
from suites.conformance.arrange import ROW_BATCH, ROWS, RecordExamples, capped, watched
from suites.registration import suite

suite(seconds=1.7, stage="cpu", needs="cpu")

Lived = tuple[Batch, Life]
CHUNKED = (("chunk_size", 7), ("page_size", 4))
MOMENTS = (1, 2, 5)
"""Steps: between two chunks of a prefill, between prefill and decoding, between a draft and its verification."""


def names_for(lane: Lane) -> list[str]:
    """Lives that say something about the lane."""
    return [name for name in LIVES if name != "reload_drafter" or lane.spec.has_weights]


def small() -> Batch:
    """Two requests of several chunks. One shows its hidden states and their mean; the other may go on from cached pages
    and pools rows of its output alone."""
    first, second = ragged_five(ROWS).requests[3:]
    first = capped(replace(first, pooled_hidden="both"), 16)
    second = capped(replace(second, return_hidden_states=False, pooled_hidden="output"), 20)
    return Batch((first, second), k=3)


def full_life(lane: Lane) -> Lived:
    """Every life in one run under overlap scheduling, the first of them while prompts are prefilled."""
    batch = replace(small(), changes=(("chunk_size", 12), ("page_size", 4), ("overlap", True)))
    return batch, one_after_another(batch.requests, names_for(lane), start=1, gap=2)


def lives_by_themselves(lane: Lane) -> Iterator[Lived]:
    for name in names_for(lane):
        for step in MOMENTS:
            for overlap in (False, True):
                batch = replace(small(), changes=(*CHUNKED, ("overlap", overlap)))
                yield batch, LIVES[name](batch.requests, step)
        crowd = watched(tiny_pool_preemption(ROWS))
        yield crowd, LIVES[name](crowd.requests, 7)
        guests = abort_storm(ROWS)
        yield guests, LIVES[name](guests.requests, 2)


def lived(lane: Lane, batch: Batch, life: Life) -> Run:
    """Run the batch with `life` going on, and check what holds of any run."""
    fitted = lane.fit(batch)
    bound = step_bound(fitted.requests) + max(action.step for action in life)
    setup = {"k": fitted.k, "warm": fitted.warm, "family": ROWS.family, **fitted.setup}
    run = lane.run(fitted.requests, actions=life, max_steps=bound, **setup)
    lane.check(sched_2(run, bound))
    if lane.capabilities.grey_box:
        lane.check(kv_1(run))
    return run


def undisturbed(lane: Lane, batch: Batch) -> Run:
    """The same requests in the plainest way, none of them aborted."""
    calm = tuple(replace(request, abort_step=None) for request in batch.requests)
    return lane.run_batch(Batch(calm, batch.k), family=ROWS.family)


@pytest.mark.invariant("EQUAL-2", "KV-1", "SCHED-2")
def test_nothing_shows(lane: Lane, thorough: bool, record_examples: RecordExamples) -> None:
    for batch, life in [full_life(lane), *(lives_by_themselves(lane) if thorough else ())]:
        run = lived(lane, batch, life)
        lane.check(equal_2(undisturbed(lane, batch), run, name=f"undisturbed by {life}"))
        record_examples(1)


@pytest.mark.invariant("EQUAL-2", "KV-1", "SCHED-2")
@settings(max_examples=max(1, settings().max_examples // 8))
@given(batch=ROW_BATCH, data=st.data())
def test_any_life(lane: Lane, batch: Batch, data: st.DataObject) -> None:
    run = lived(lane, batch, data.draw(lives(batch.requests, names_for(lane))))
    lane.check(equal_2(lane.run_batch(batch, family=ROWS.family), run, name="undisturbed"))


@pytest.mark.invariant("ACCEPT-2")
def test_acceptance_does_not_change(lane: Lane, thorough: bool) -> None:
    """Blocks begin at the same tokens. What one life has spoilt the next may mend (weights that were lost over a sleep
    are read again), so one sleep goes by itself; in the full tier every life does, on one engine."""
    batch, life = full_life(lane)
    asleep = replace(small(), changes=CHUNKED)
    lane.check(accept_2_drift([undisturbed(lane, batch), lived(lane, batch, life)]))
    lane.check(accept_2_drift([undisturbed(lane, batch), lived(lane, asleep, LIVES["sleep"](asleep.requests, 6))]))
    if not thorough:
        return
    requests = lane.fit(batch).requests
    with lane.start(family=ROWS.family, page_size=4) as engine:
        runs = [engine.run(requests)]
        for name in names_for(lane):
            runs += [engine.run(requests, actions=LIVES[name](requests, 0)), engine.run(requests)]
    lane.check(accept_2_drift(runs))


@pytest.mark.invariant("STATE-1")
def test_state_is_that_of_a_fresh_engine(lane: Lane, thorough: bool) -> None:
    lane.grey_box()
    batch = small()
    requests = tuple(capped(request, 6) for request in batch.requests[: 1 + thorough])
    life = one_after_another(requests, ["preempt", "sleep", "pause"], start=2, gap=1)
    run = lived(lane, replace(batch, requests=requests, changes=(*CHUNKED, ("snapshots", True))), life)
    assert any(step.snapshots for step in run.steps if step.step > life[-1].step), "nobody ran on after waking"
    with lane.start(family=ROWS.family, k=batch.k) as engine:
        lane.check(state_1(run, engine.fresh_state))
