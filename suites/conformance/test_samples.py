"""n > 1: each of n samples is a request of its own, in tokens, rows, acceptance and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.contract import Refused, Request, Run, SamplingParams
from harness.contract.request import PooledRows
from harness.invariants import accept_1, alias_1, alias_1_pooled, alias_2, count_1, equal_2, kv_1, sched_2
from harness.workloads.lane import Lane, step_bound
from harness.workloads.strategies import tight_pool
from suites.conformance.arrange import ROWS
from suites.registration import suite

suite(seconds=1.8, stage="cpu", needs="cpu")

SEED, K = 11, 3


def requests() -> tuple[Request, ...]:
    """Greedy, seeded, aborted in mid-flight, and one that is alone."""
    greedy = SamplingParams(max_new_tokens=8, n=2)
    seeded = replace(greedy, temperature=1.5, seed=SEED, logprobs=1, n=3)
    return (
        Request(request_id="greedy", prompt_token_ids=ROWS.prompt(9, 1), sampling=greedy, return_hidden_states=True),
        Request(request_id="seeded", prompt_token_ids=ROWS.prompt(6, 2), sampling=seeded),
        Request(request_id="aborted", prompt_token_ids=ROWS.prompt(3, 3), sampling=greedy, abort_step=4),
        Request(request_id="single", prompt_token_ids=ROWS.prompt(5, 4), sampling=replace(greedy, n=1)),
    )


def together(lane: Lane) -> Run:
    """All in a pool that holds few of them at once."""
    lane.needs("n", "seed", "abort_step")
    all_ = requests()
    pool = {"page_size": 4, "num_pages": tight_pool(all_, 4, K, 6)} if lane.capabilities.grey_box else {}
    return lane.run(all_, family=ROWS.family, k=K, **pool)


def sample_id(request: Request, index: int) -> str:
    return f"{request.request_id}:{index}"


def as_requests(request: Request) -> tuple[Request, ...]:
    """A request of its own for each sample, seeds counted up, as the engine declares."""
    sampling = replace(request.sampling, n=1)
    return tuple(
        replace(
            request,
            request_id=sample_id(request, index),
            sampling=sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index),
        )
        for index in range(request.sampling.n)
    )


def split(run: Run) -> Run:
    """The run as if each sample had been a request of its own. Steps name samples, so they are left out."""
    named = {request.request_id: request for request in run.requests}
    completions = tuple(
        replace(done, request_id=sample_id(named[done.request_id], done.index), index=0) for done in run.completions
    )
    singles = tuple(single for request in run.requests for single in as_requests(request))
    return replace(run, requests=singles, completions=completions, steps=())


@pytest.mark.invariant("COUNT-1", "KV-1", "SCHED-2", "ALIAS-1", "ALIAS-2")
def test_every_sample_is_answered_once_from_memory_of_its_own(lane: Lane) -> None:
    run = together(lane)
    lane.check(count_1(run) + sched_2(run, step_bound(run.requests)) + alias_1(run, lane.rows(ROWS.family)))
    lane.check(alias_2(run))
    if lane.capabilities.grey_box:
        assert any(step.preempted for step in run.steps), "nobody was preempted: the pool is too large"
        lane.check(kv_1(run))


@pytest.mark.invariant("EQUAL-2", "SCHED-3")
def test_samples_equal_requests_of_their_own(lane: Lane) -> None:
    """Greedy ones are all alike; seeded ones draw with seeds that count up, where the engine says so."""
    run = together(lane)
    if run.capabilities.seeds_of_samples != "consecutive":
        raise Refused(f"n: engine={lane.engine} does not say which seeds its samples draw with")
    calm = [replace(request, abort_step=None) for request in run.requests]
    singles = tuple(single for request in calm for single in as_requests(request))
    lane.check(equal_2(split(run), lane.run(singles, family=ROWS.family, k=K), seeded=True, name="single requests"))
    alone = lane.run(calm[1:2], family=ROWS.family, k=K)
    lane.check(equal_2(run, alone, seeded=True, name="the seeded request alone"))
    assert len({done.token_ids for done in alone.completions}) > 1, "samples of one request are all alike"


@pytest.mark.invariant("ACCEPT-1")
def test_samples_earn_what_one_request_earns(lane: Lane) -> None:
    run = together(lane)
    greedy = replace(run, requests=run.requests[:1], completions=run.completions[:2], steps=())
    solo = lane.run(as_requests(run.requests[0])[:1], family=ROWS.family, k=K)
    lane.check(accept_1(greedy, {"greedy": solo.completions[0].accept_lens or ()}))


@pytest.mark.invariant("ALIAS-1", "ALIAS-2")
@pytest.mark.parametrize("which", ["output", "both"])
def test_every_sample_has_a_mean_of_its_own(lane: Lane, which: PooledRows) -> None:
    """Samples begin with one prompt and go on with other tokens: the rows of one count for no other."""
    lane.needs("n", "seed", "pooled_hidden")
    request = replace(requests()[1], pooled_hidden=which)
    run = lane.run((request,), family=ROWS.family, k=K)
    assert len({done.token_ids for done in run.completions}) > 1, "samples of one request are all alike"
    lane.check(alias_1_pooled(run, lane.rows(ROWS.family)) + alias_2(run))
