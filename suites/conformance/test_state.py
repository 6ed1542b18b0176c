"""STATE: what an engine keeps between steps is what a fresh engine would have computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from harness.invariants import accept_1, state_1, state_2
from harness.workloads.acceptance import deserved
from harness.workloads.known import known_family
from harness.workloads.lane import Lane
from harness.workloads.scenarios import (
    chunked_prefill,
    forked_prefix,
    short_prompts,
    tiny_pool_preemption,
    warm_prefix,
)
from harness.workloads.strategies import Batch
from suites.conformance.arrange import ANY_BATCH, ROWS, WALK, MakeBatch, RecordExamples, capped, scenarios
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=4, stage="cpu", needs="cpu")

SNAPSHOTS = (("snapshots", True),)
SEVERAL_LAYERS = "mtp3"
"""A drafter of the walks with three MTP layers."""

NEW_TOKENS, REQUESTS = 7, 3
"""Each committed prefix is prefilled by an engine of its own, which is slow: keep them few."""


def judge(lane: Lane, batch: Batch, family: str) -> None:
    """Run with snapshots and compare each with a fresh prefill of the same committed tokens."""
    lane.grey_box()
    requests = tuple(
        capped(request, min(request.sampling.max_new_tokens, NEW_TOKENS)) for request in batch.requests[:REQUESTS]
    )
    watched = replace(batch, requests=requests, changes=batch.changes + SNAPSHOTS)
    run = lane.run_batch(watched, family=family)
    with lane.start(family=family, k=batch.k) as engine:
        lane.check(state_1(run, engine.fresh_state))


@pytest.mark.invariant("STATE-1")
@settings(max_examples=max(2, settings().max_examples // 3))
@given(batch=ANY_BATCH)
def test_state_of_any_batch(lane: Lane, batch: Batch) -> None:
    assume(
        any(request.sampling.max_new_tokens > 1 and request.abort_step is None for request in batch.requests[:REQUESTS])
    )
    judge(lane, batch, WALK.family)


@pytest.mark.invariant("STATE-1")
@pytest.mark.parametrize(
    "make",
    tiered(
        [short_prompts, tiny_pool_preemption, chunked_prefill, warm_prefix, forked_prefix],
        tiny_pool_preemption,
        warm_prefix,
        forked_prefix,
    ),
)
def test_state_in_scenarios(lane: Lane, make: MakeBatch) -> None:
    judge(lane, make(ROWS), ROWS.family)


@pytest.mark.invariant("STATE-1", "ACCEPT-1")
@pytest.mark.drafters("MTP")
@pytest.mark.parametrize("make", [warm_prefix, tiny_pool_preemption, chunked_prefill])
def test_state_of_several_layers(lane: Lane, make: MakeBatch) -> None:
    """Three MTP layers: what is kept of the last tokens until their rows are final lies by pool row, where others have
    been before."""
    lane.grey_box()
    batch = make(WALK)
    requests = tuple(capped(replace(r, return_hidden_states=False), NEW_TOKENS) for r in batch.requests[:REQUESTS])
    setup = lane.setup(k=batch.k, snapshots=True, **batch.setup)
    with lane.start_setup(replace(setup, target=setup.target.parent / SEVERAL_LAYERS)) as engine:
        if batch.warm:
            engine.run(requests)
        run = engine.run(requests)
        lane.check(state_1(run, engine.fresh_state))
    lane.check(accept_1(run, deserved(run, known_family(WALK.family).drafters[SEVERAL_LAYERS])))


@pytest.mark.invariant("STATE-2")
@given(batch=ANY_BATCH)
def test_auxiliary_rows(lane: Lane, batch: Batch) -> None:
    lane.grey_box()
    lane.check(state_2(lane.run_batch(batch)))


@pytest.mark.invariant("STATE-2")
def test_auxiliary_rows_in_scenarios(lane: Lane, record_examples: RecordExamples) -> None:
    lane.grey_box()
    for _, run in scenarios(lane):
        lane.check(state_2(run))
        record_examples(1)
