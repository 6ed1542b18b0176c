"""ACCEPT: verification repairs a bad draft, so only acceptance shows a broken drafter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from harness.contract import Run
from harness.invariants import Violation, accept_1, accept_2, accept_2_drift
from harness.known_answer import Drafter
from harness.workloads.acceptance import deserved, deserved_drafts
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.scenarios import (
    chunked_prefill,
    forked_prefix,
    one_token,
    overlap_buckets,
    plain,
    ragged_eight,
    repeats,
    short_prompts,
    tiny_pool_preemption,
    warm_prefix,
)
from harness.workloads.strategies import Batch
from suites.conformance.arrange import BARE_BATCH, DRAWING, ROW_BATCH, ROWS, WALK, MakeBatch, offering, scenarios
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=5.7, stage="cpu", needs="cpu")

UNFLAGGED = (ragged_eight, short_prompts, tiny_pool_preemption, chunked_prefill, warm_prefix, overlap_buckets)
LENGTHS = [(short_prompts, 1), (short_prompts, 2), (short_prompts, 6), (tiny_pool_preemption, 5)]
CHAINS = [name for name, spec in LANES.items() if spec.speculative and spec.topk == 1]
MAY_EQUAL_TARGET = [name for name, spec in LANES.items() if spec.may_equal_target]
REPEATING = ("walk", "census-stutter")
WITHOUT_CHECKPOINT = [name for name, spec in LANES.items() if spec.without_checkpoint]


def deserves(lane: Lane, run: Run, family: str) -> list[Violation]:
    """ACCEPT-1 by the closed form; of chains the number of drafts as well."""
    drafter = lane.drafter(family)
    drafted = deserved_drafts(run, drafter) if lane.spec.topk == 1 else None
    return accept_1(run, deserved(run, drafter), drafted)


def accepts_all(run: Run, drafter: Drafter) -> list[Violation]:
    """All k drafts every time; where an engine drafts less near a cap, all that it may."""
    return accept_1(run, deserved(run, drafter)) if run.capabilities.drafts_within_cap else accept_2(run, full=True)


@pytest.mark.invariant("ACCEPT-1")
@given(batch=BARE_BATCH)
def test_any_schedule(lane: Lane, batch: Batch) -> None:
    run = offering(lane.run_batch(batch), "accept_lens")
    lane.check(deserves(lane, run, WALK.family))


@pytest.mark.invariant("ACCEPT-1")
@pytest.mark.drafters(*CHAINS)
@given(batch=ROW_BATCH)
def test_drafters_that_read_history(lane: Lane, batch: Batch) -> None:
    """Chains only: which nodes a tree keeps hangs on the drafter's probabilities, and here some are exactly equal."""
    run = offering(lane.run_batch(batch, family=ROWS.family), "accept_lens")
    lane.check(deserves(lane, run, ROWS.family))


@pytest.mark.invariant("ACCEPT-1")
@pytest.mark.parametrize("make", UNFLAGGED)
def test_scenarios(lane: Lane, make: MakeBatch) -> None:
    for _, run in scenarios(lane, WALK, [make]):
        lane.check(deserves(lane, run, WALK.family))


@pytest.mark.invariant("ACCEPT-1")
@pytest.mark.parametrize(("make", "k"), tiered(LENGTHS, (short_prompts, 1), (tiny_pool_preemption, 5)))
def test_draft_lengths(lane: Lane, make: MakeBatch, k: int) -> None:
    run = lane.run_batch(replace(make(WALK), k=k))
    lane.check(deserves(lane, run, WALK.family))


@pytest.mark.invariant("ACCEPT-1")
@pytest.mark.drafters(*WITHOUT_CHECKPOINT)
@pytest.mark.parametrize("family", REPEATING)
@pytest.mark.parametrize("k", [1, 3, 5])
def test_texts_that_repeat(lane: Lane, family: str, k: int) -> None:
    """What such drafters live on; `suites/known_answer` holds that acceptance covers 0..k here."""
    run = lane.run_batch(replace(repeats(vocabulary(family)), k=k), family=family)
    lane.check(deserves(lane, run, family))


@pytest.mark.invariant("ACCEPT-1")
@pytest.mark.drafters(*DRAWING)
def test_greedy_requests_among_sampled_ones(lane: Lane) -> None:
    """Where drafts are drawn, those of a greedy request are the drafter's best all the same, whoever else is there."""
    lane.needs("temperature")
    words = vocabulary("law")
    requests = plain(words, (4, 7, 3, 5), (14, 14, 14, 14))
    hot = [
        replace(r, request_id=f"hot{i}", sampling=replace(r.sampling, temperature=2.0)) for i, r in enumerate(requests)
    ]
    mixed = [request for pair in zip(requests, hot, strict=True) for request in pair]
    run = lane.run(mixed, family=words.family, draft_sample_method="probabilistic")
    greedy = tuple(done for done in run.completions if run.request(done.request_id).sampling.greedy)
    calm = replace(run, requests=requests, completions=greedy, steps=())
    lane.check(deserves(lane, calm, words.family))


@pytest.mark.invariant("ACCEPT-2")
@pytest.mark.drafters(*MAY_EQUAL_TARGET)
@pytest.mark.parametrize("k", tiered(range(1, 6), 1, 4))
def test_perfect_drafter(lane: Lane, k: int) -> None:
    family = vocabulary("walk-perfect")
    run = lane.run_batch(replace(ragged_eight(family), k=k), family=family.family)
    lane.check(accepts_all(run, lane.drafter(family.family)))


@pytest.mark.invariant("ACCEPT-2")
@pytest.mark.drafters(*MAY_EQUAL_TARGET)
@pytest.mark.parametrize("make", tiered(UNFLAGGED, tiny_pool_preemption, warm_prefix, overlap_buckets))
def test_perfect_drafter_in_scenarios(lane: Lane, make: MakeBatch) -> None:
    family = vocabulary("walk-perfect")
    for _, run in scenarios(lane, family, [make]):
        lane.check(accepts_all(run, lane.drafter(family.family)))


@pytest.mark.invariant("ACCEPT-2")
@pytest.mark.drafters(*WITHOUT_CHECKPOINT)
@pytest.mark.parametrize("k", range(1, 6))
def test_text_that_is_always_drafted_right(lane: Lane, k: int) -> None:
    """Where no drafter equals the target, a text can be so plain that its drafts are all right."""
    lane.needs("logit_bias")
    lane.check(accept_2(lane.run_batch(one_token(WALK, k)), full=True))


@pytest.mark.invariant("ACCEPT-1")
@pytest.mark.drafters(*CHAINS)
@pytest.mark.parametrize("make", [warm_prefix, forked_prefix])
def test_drafters_that_read_history_behind_a_prefix_hit(lane: Lane, make: MakeBatch) -> None:
    """Nobody watches hidden states here: that would keep the prefix cache out."""
    run = lane.run_batch(make(ROWS), family=ROWS.family)
    lane.check(deserves(lane, run, ROWS.family))


@pytest.mark.invariant("ACCEPT-2")
def test_replay_does_not_drift(lane: Lane) -> None:
    """The same prompts again and again on one engine, with other traffic in between. Every other request watches its
    hidden states, which keeps the prefix cache out; of the others most of the prompt is cached the second time."""
    batch = ragged_eight(ROWS)
    requests = tuple(replace(r, return_hidden_states=place % 2 == 0) for place, r in enumerate(batch.requests))
    batch = lane.fit(replace(batch, requests=requests))
    other = lane.fit(tiny_pool_preemption(ROWS, seed=1))
    runs = []
    with lane.start(family=ROWS.family, k=batch.k, page_size=4) as engine:
        for _ in range(3):
            runs.append(engine.run(batch.requests))
            engine.run(other.requests)
    lane.check(accept_2_drift(runs))
