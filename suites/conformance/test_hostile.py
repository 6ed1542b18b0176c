"""Hostile drafters: whatever a drafter proposes, the user must see what the target alone would have said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.contract import Run
from harness.invariants import (
    accept_1,
    count_1,
    count_2,
    count_2_blocks,
    equal_1,
    finish_1,
    kv_1,
    sched_2,
    shape_1,
    shape_2,
    state_1,
)
from harness.workloads.hostile import accept_pattern, hostile_drafters
from harness.workloads.lane import Lane, step_bound
from harness.workloads.scenarios import mixed_flags, ragged_eight
from harness.workloads.strategies import Batch
from suites.conformance.arrange import WALK
from suites.registration import suite

suite(seconds=4.2, stage="cpu", needs="cpu")

HOSTILE = hostile_drafters(WALK.continue_, WALK.vocab_size, WALK.eos_token_id)

pytestmark = pytest.mark.drafters("CUSTOM")


def batch_under_attack() -> Batch:
    """All flags and all lengths in one batch of 17, of which 8 run at once."""
    ragged, flagged = ragged_eight(WALK), mixed_flags(WALK)
    flags = tuple(replace(request, request_id=f"f{request.request_id}") for request in flagged.requests)
    return Batch(ragged.requests + flags, k=4)


def attack(lane: Lane, name: str) -> Run:
    batch = batch_under_attack()
    return lane.run_batch(batch, script=HOSTILE[name])


@pytest.mark.invariant("COUNT-1")
@pytest.mark.parametrize("name", HOSTILE)
def test_counts(lane: Lane, name: str) -> None:
    lane.check(count_1(attack(lane, name)))


@pytest.mark.invariant("COUNT-2")
@pytest.mark.parametrize("name", HOSTILE)
def test_counters(lane: Lane, name: str) -> None:
    run = attack(lane, name)
    lane.check(count_2(run) + count_2_blocks(run))


@pytest.mark.invariant("SHAPE-1")
@pytest.mark.parametrize("name", HOSTILE)
def test_shapes(lane: Lane, name: str) -> None:
    lane.check(shape_1(attack(lane, name)))


@pytest.mark.invariant("SHAPE-2")
@pytest.mark.parametrize("name", HOSTILE)
def test_ids(lane: Lane, name: str) -> None:
    lane.check(shape_2(attack(lane, name)))


@pytest.mark.invariant("EQUAL-1")
@pytest.mark.parametrize("name", HOSTILE)
def test_tokens(lane: Lane, name: str) -> None:
    lane.check(equal_1(attack(lane, name), lane.run_batch(batch_under_attack(), speculative=False)))


@pytest.mark.invariant("FINISH-1")
@pytest.mark.parametrize("name", HOSTILE)
def test_finishes(lane: Lane, name: str) -> None:
    plain = lane.run_batch(batch_under_attack(), speculative=False)
    lane.check(finish_1(attack(lane, name), plain, detokenize=WALK.text))


@pytest.mark.invariant("KV-1", "SCHED-2")
@pytest.mark.parametrize("name", HOSTILE)
def test_resources(lane: Lane, name: str) -> None:
    run = attack(lane, name)
    lane.check(kv_1(run) + sched_2(run, step_bound(run.requests)))


@pytest.mark.invariant("STATE-1")
@pytest.mark.parametrize("name", ["always_right", "always_wrong", "random_length", "out_of_range"])
def test_state(lane: Lane, name: str) -> None:
    batch = Batch(ragged_eight(WALK).requests[1:4], k=3, changes=(("snapshots", True),))
    run = lane.run_batch(batch, script=HOSTILE[name])
    with lane.start(k=batch.k) as engine:
        lane.check(state_1(run, engine.fresh_state))


@pytest.mark.invariant("ACCEPT-1")
@given(k=st.integers(1, 5), data=st.data())
def test_given_accept_lengths_happen(lane: Lane, k: int, data: st.DataObject) -> None:
    """Any accept lengths, ragged over the batch, come out as they were scripted."""
    requests = ragged_eight(WALK).requests
    pattern = st.lists(st.integers(1, k + 1), min_size=1, max_size=4)
    patterns = {request.request_id: data.draw(pattern, request.request_id) for request in requests}
    prompt_lens = {request.request_id: len(request.prompt_token_ids) for request in requests}
    script = accept_pattern(WALK.continue_, WALK.vocab_size, prompt_lens, patterns)
    run = lane.run(requests, k=k, script=script)
    lane.check(
        accept_1(run, {r.request_id: scripted(patterns[r.request_id], r.sampling.max_new_tokens) for r in requests})
    )


def scripted(pattern: list[int], max_new_tokens: int) -> list[int]:
    """The pattern over and over, until the cap is reached; the prefill gives the first token."""
    lens: list[int] = []
    while 1 + sum(lens) < max_new_tokens:
        lens.append(pattern[len(lens) % len(pattern)])
    return lens
