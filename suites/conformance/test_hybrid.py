"""A target with recurrent state under every invariant: what cannot be cut back must have been kept.

Tokens and hidden rows of the hybrid family depend on the recurrent state of their request, so a state that was not
rolled back, is a neighbour's or was advanced twice is red as a token, a row or a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from harness.contract import Run
from harness.invariants import (
    accept_1,
    accept_2,
    alias_1,
    count_2,
    count_2_blocks,
    equal_1,
    equal_2,
    judge,
    logp_1,
    sched_1,
    sched_2,
    sched_3,
    shape_1,
)
from harness.known_answer import Target
from harness.known_answer.census import LAG
from harness.known_answer.hybrid import HybridTarget
from harness.workloads.acceptance import deserved
from harness.workloads.known import known_family, vocabulary
from harness.workloads.lane import Lane, step_bound
from harness.workloads.lanes import LANES, factory_of
from harness.workloads.scenarios import (
    abort_storm,
    chunked_prefill,
    mixed_flags,
    overlap_buckets,
    plain,
    ragged_eight,
    ragged_five,
    short_prompts,
    tiny_pool_preemption,
    warm_prefix,
)
from harness.workloads.strategies import Batch, batches
from suites.conformance.arrange import MakeBatch, alone, offering, watched
from suites.conformance.test_equal import SETUPS, strayed
from suites.conformance.test_state import SNAPSHOTS
from suites.conformance.test_state import judge as judge_state
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=3.1, stage="cpu", needs="cpu")

HYBRID = vocabulary("hybrid")
SPECULATIVE = [
    name
    for name, lane in LANES.items()
    if (lane.folder in known_family(HYBRID.family).drafters and lane.topk == 1 and not lane.scripted) or name == "NGRAM"
]
"""Lanes whose drafter the family has."""
BARE = (ragged_eight, short_prompts, tiny_pool_preemption, chunked_prefill, warm_prefix, overlap_buckets)
SCENARIOS = (*BARE, abort_storm, mixed_flags)
IN_EVERY_RUN = (tiny_pool_preemption, warm_prefix, overlap_buckets)
ANY_ROWS = batches(HYBRID, mixed=False).map(watched)
FEW = max(1, settings().max_examples // 6)


def logged(batch: Batch) -> Batch:
    """The batch with logprobs of every request. Hidden states are left as they are: they keep the prefix cache out."""
    requests = (replace(request, sampling=replace(request.sampling, logprobs=2)) for request in batch.requests)
    return replace(batch, requests=tuple(requests))


def run_logged(lane: Lane, make: MakeBatch) -> Run:
    return lane.run_batch(logged(make(HYBRID)), family=HYBRID.family)


def name_row(target: Target) -> Callable[[torch.Tensor], str]:
    """A row by its token and by what the state behind it has taken in."""

    def name(row: torch.Tensor) -> str:
        if not row.isfinite().all():
            return "not finite"
        told = target.decode_row(row, 0)
        assert told.state_counts is not None
        assert told.recent is not None
        taken = sum(told.state_counts.values())
        return f"token {told.token}; its state took in {taken} tokens, the last of them {told.recent[:5]}"

    return name


def check_rows(lane: Lane, run: Run) -> None:
    rows = lane.rows(HYBRID.family)
    # Reading rows takes time: only for the message.
    lane.check(alias_1(run, rows) and alias_1(run, rows, name_row(lane.target(HYBRID.family))))


@pytest.mark.invariant(
    "ALIAS-1",
    "ALIAS-2",
    "COUNT-1",
    "EQUAL-1",
    "FINISH-1",
    "FINISH-2",
    "KV-1",
    "LOGP-1",
    "SCHED-2",
    "SHAPE-2",
)
@pytest.mark.drafters("none", *SPECULATIVE)
@pytest.mark.parametrize("make", tiered(SCENARIOS, *IN_EVERY_RUN, mixed_flags))
def test_scenarios(lane: Lane, make: MakeBatch) -> None:
    run = run_logged(lane, make)
    lane.check(judge(run))
    lane.check(sched_2(run, step_bound(run.requests)))
    if make is not warm_prefix:
        check_rows(lane, run)
    if make is not mixed_flags:
        lane.check(logp_1(run, lane.target(HYBRID.family).logprobs))
    if make in BARE:
        lane.check(strayed(run, HYBRID))
    elif lane.speculative:
        batch = logged(make(HYBRID))
        lane.check(equal_1(run, lane.run_batch(batch, family=HYBRID.family, speculative=False)))


@pytest.mark.invariant("ACCEPT-1", "COUNT-2", "SHAPE-1")
@pytest.mark.drafters(*SPECULATIVE)
@pytest.mark.parametrize("make", tiered(BARE, *IN_EVERY_RUN))
def test_acceptance_in_scenarios(lane: Lane, make: MakeBatch) -> None:
    run = run_logged(lane, make)
    lane.check(count_2(run) + count_2_blocks(run) + shape_1(run))
    lane.check(accept_1(run, deserved(run, lane.drafter(HYBRID.family))))


@pytest.mark.invariant("ACCEPT-1", "ALIAS-1", "EQUAL-1")
@pytest.mark.drafters(*SPECULATIVE)
@settings(max_examples=FEW)
@given(batch=ANY_ROWS)
def test_any_schedule(lane: Lane, batch: Batch) -> None:
    run = lane.run_batch(batch, family=HYBRID.family)
    check_rows(lane, run)
    lane.check(strayed(run, HYBRID))
    lane.check(accept_1(offering(run, "accept_lens"), deserved(run, lane.drafter(HYBRID.family))))


@pytest.mark.invariant("ACCEPT-1", "ALIAS-1")
@pytest.mark.drafters(*SPECULATIVE)
@pytest.mark.parametrize("k", tiered([1, 7, 15], 7))
def test_draft_lengths(lane: Lane, k: int) -> None:
    """Drafts shorter and much longer than a page, a prompt and what is left to generate."""
    batch = replace(short_prompts(HYBRID), k=k, changes=(("page_size", 4),))
    run = lane.run_batch(batch, family=HYBRID.family)
    check_rows(lane, run)
    lane.check(accept_1(run, deserved(run, lane.drafter(HYBRID.family))))


@pytest.mark.invariant("ACCEPT-2")
@pytest.mark.drafters(*(name for name in SPECULATIVE if LANES[name].may_equal_target))
@pytest.mark.parametrize("k", tiered([1, 7, 15], 7))
def test_perfect_drafter(lane: Lane, k: int) -> None:
    """Every state that is kept is the last one at some time; MTP calls for EOS behind LAG drafts of its own."""
    words = vocabulary("hybrid-perfect")
    run = lane.run(plain(words, (1, 3, 9), (20, 33, 18)), family=words.family, k=k, page_size=4)
    lane.check(accept_1(run, deserved(run, lane.drafter(words.family))))
    if k <= LAG:
        lane.check(accept_2(run, full=True))


@pytest.mark.invariant("STATE-1")
@pytest.mark.drafters(*SPECULATIVE)
@pytest.mark.parametrize("make", [tiny_pool_preemption, warm_prefix, overlap_buckets])
def test_state_is_the_closed_form(lane: Lane, make: MakeBatch) -> None:
    """Counts exactly, the decayed head to the last digit of a float32, after every step; prompts come in chunks."""
    lane.grey_box()
    batch = make(HYBRID)
    changes = (*batch.changes, ("chunk_size", 9), *SNAPSHOTS)
    run = lane.run_batch(replace(batch, changes=changes), family=HYBRID.family)
    target = lane.target(HYBRID.family)
    assert isinstance(target, HybridTarget)
    wrong = []
    for step in run.steps:
        for snapshot in step.snapshots:
            assert snapshot.recurrent_state is not None
            right, got = target.state(snapshot.token_ids[:-1]), snapshot.recurrent_state.double()
            if not (torch.equal(got[:, 1], right[:, 1]) and (got[:, 0] - right[:, 0]).abs().max() <= 2.0**-23):
                wrong.append((step.step, snapshot.owner, len(snapshot.token_ids), got[0, 1].sum()))
    assert not wrong, f"(step, owner, committed tokens, tokens that the state has counted): {wrong}"


@pytest.mark.invariant("STATE-1")
@pytest.mark.drafters("none", *SPECULATIVE)
@pytest.mark.parametrize("make", [warm_prefix])
def test_state_of_a_fresh_engine(lane: Lane, make: MakeBatch) -> None:
    judge_state(lane, make(HYBRID), HYBRID.family)


@pytest.mark.invariant("EQUAL-2")
@pytest.mark.drafters("none", *SPECULATIVE)
def test_prefix_hits_restore_the_state(lane: Lane) -> None:
    """Warm and cold say the same, and warm does hit: all full pages but what must be left to compute. The prompts end
    before, at and behind a page border, and share one trunk with continuations that were generated."""
    trunk = HYBRID.prompt(9, 3)
    trunk += HYBRID.continue_(trunk, 14)
    lengths = range(3, 23, 2)
    requests = plain(HYBRID, tuple(lengths), (6,) * len(lengths))
    cut = zip(requests, lengths, strict=True)
    batch = Batch(tuple(replace(r, prompt_token_ids=trunk[:n]) for r, n in cut), k=3, changes=(("page_size", 4),))
    cold = lane.run_batch(replace(batch, changes=(*batch.changes, ("prefix_cache", False))), family=HYBRID.family)
    warm = lane.run_batch(replace(batch, warm=True), family=HYBRID.family)
    lane.check(equal_2(cold, warm, accept_lens=lane.speculative, name="warm"))
    lane.check(strayed(warm, HYBRID))
    hits = [warm.of(request.request_id).usage.cached_tokens for request in requests]
    assert hits == [(n - 1) // 4 * 4 for n in lengths]


@pytest.mark.invariant("EQUAL-2")
@pytest.mark.drafters("none", *SPECULATIVE)
def test_setups(lane: Lane, setups: Iterable[str]) -> None:
    batch = watched(ragged_five(HYBRID))
    run = lane.run_batch(batch, family=HYBRID.family)
    for name in setups:
        changes = {key: value for key, value in SETUPS[name].items() if key != "warm"}
        changed = replace(batch, changes=tuple(changes.items()), warm="warm" in SETUPS[name])
        variant = lane.run_batch(changed, family=HYBRID.family)
        lane.check(equal_2(run, variant, accept_lens=lane.speculative, name=name))


@pytest.fixture
def setups(request: pytest.FixtureRequest) -> Iterable[str]:
    """All of them in the full tier."""
    return SETUPS if request.config.getoption("--tier") == "full" else ("everything",)


@pytest.mark.invariant("SCHED-1")
@pytest.mark.drafters("none", *SPECULATIVE)
def test_aborts(lane: Lane) -> None:
    """Rows that aborted requests give back have new tenants at once."""
    batch = logged(abort_storm(HYBRID))
    calm = replace(batch, requests=tuple(replace(request, abort_step=None) for request in batch.requests))
    lane.check(sched_1(run_logged(lane, abort_storm), lane.run_batch(calm, family=HYBRID.family)))


@pytest.mark.invariant("SCHED-3")
@pytest.mark.drafters("none", *SPECULATIVE)
def test_flags_stay_with_their_request(lane: Lane) -> None:
    batch = mixed_flags(HYBRID)
    few = replace(batch, requests=(batch.requests[0], batch.requests[6], batch.requests[8]))
    run = lane.run_batch(few, family=HYBRID.family)
    lane.check(sched_3(run, {r.request_id: alone(lane, few, r, HYBRID.family) for r in few.requests}))


@pytest.mark.invariant("ALIAS-1", "EQUAL-1", "STATE-1")
@pytest.mark.drafters("STANDALONE", "MTP")
def test_trees(lane: Lane) -> None:
    """A node's state comes from its parent, and the request's from the end of the accepted path."""
    lane.grey_box()
    requests = watched(ragged_five(HYBRID)).requests
    setup = lane.setup(family=HYBRID.family, k=3, page_size=4, snapshots=True)
    assert setup.drafter is not None
    tree = replace(setup, drafter=replace(setup.drafter, topk=2, num_draft_tokens=9))
    run = factory_of(lane.engine).start(tree).run(requests)
    check_rows(lane, run)
    lane.check(equal_1(run, lane.baseline(requests, family=HYBRID.family)))
    lens = {length for done in run.completions for length in done.accept_lens or ()}
    assert lens == {1, 2, 3, 4}
    target = lane.target(HYBRID.family)
    assert isinstance(target, HybridTarget)
    for snapshot in (snapshot for step in run.steps for snapshot in step.snapshots):
        assert snapshot.recurrent_state is not None
        assert torch.equal(snapshot.recurrent_state[:, 1].double(), target.state(snapshot.token_ids[:-1])[:, 1])


@pytest.mark.invariant("EQUAL-1")
@pytest.mark.drafters("STANDALONE", "MTP")
def test_the_next_turn_behind_trees(lane: Lane) -> None:
    """A page that an accepted path has filled is found with the state at the end of that path, not with the one of
    the node that stands in its place in the window. Pages of one token: every node that is accepted ends one."""
    lane.grey_box()
    requests = plain(HYBRID, (3, 6, 2), (16, 14, 18))
    setup = lane.setup(family=HYBRID.family, k=3, page_size=1)
    assert setup.drafter is not None
    tree = replace(setup, drafter=replace(setup.drafter, topk=2, num_draft_tokens=9))
    with lane.start_setup(tree) as engine:
        said = engine.run(requests).completions
        for cut in (4, 1):
            turn = tuple(
                replace(r, prompt_token_ids=(*r.prompt_token_ids, *d.token_ids[:-cut]))
                for r, d in zip(requests, said, strict=True)
            )
            run = engine.run(turn)
            lane.check(strayed(run, HYBRID))
            assert all(done.usage.cached_tokens >= len(done.prompt_token_ids) - 4 for done in run.completions)
