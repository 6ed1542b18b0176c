"""Who is preempted, when, and what of it is computed again; what waits for pages holds none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.contract import Request, SamplingParams
from harness.invariants import alias_1, alias_1_pooled, check, count_1, equal_2, kv_1, logp_1
from harness.workloads.known import vocabulary
from harness.workloads.scenarios import plain, tiny_pool_preemption
from harness.workloads.strategies import tight_pool
from suites.reference_engine.conftest import OpenLane
from suites.registration import suite

suite(seconds=5.5, stage="cpu", needs="cpu")

ROWS = vocabulary("census")
LANES = ("none", "EAGLE", "MTP")


@pytest.mark.parametrize("name", LANES)
def test_the_oldest_is_never_preempted(open_lane: OpenLane, name: str) -> None:
    """Whoever came last goes first, so that somebody gets to the end."""
    lane = open_lane(name)
    batch = tiny_pool_preemption(ROWS)
    run = lane.run_batch(batch, family=ROWS.family)
    gone = {owner for step in run.steps for owner in step.preempted}
    assert gone
    assert not any(owner.startswith(batch.requests[0].request_id) for owner in gone)


@pytest.mark.parametrize("name", LANES)
def test_preempted_between_the_chunks_of_its_prompt(open_lane: OpenLane, name: str) -> None:
    """What the chunks had brought by then (rows, logprobs, a mean) is brought again, once."""
    lane = open_lane(name)
    older = plain(ROWS, (3, 4), (30, 30))
    sampling = SamplingParams(max_new_tokens=4, logprobs=2, prompt_logprobs=2)
    long = Request(
        request_id="long",
        prompt_token_ids=ROWS.prompt(40, 7),
        sampling=sampling,
        arrival_step=2,
        return_hidden_states=True,
        pooled_hidden="both",
    )
    requests = (*older, long)
    roomy = lane.run(requests, family=ROWS.family, page_size=2, chunk_size=3)
    between = 0
    for slack in range(0, 12, 2):
        pages = tight_pool(requests, 2, 3, slack)
        run = lane.run(requests, family=ROWS.family, page_size=2, chunk_size=3, num_pages=pages)
        first = next(s.step for s in run.steps for d in s.deltas if d.request_id == "long" and d.token_ids)
        between += sum(s.step < first and any("long" in owner for owner in s.preempted) for s in run.steps)
        rows = lane.rows(ROWS.family)
        found = count_1(run) + alias_1(run, rows) + alias_1_pooled(run, rows)
        check(found + logp_1(run, lane.target(ROWS.family).logprobs) + equal_2(run, roomy, name="a tight pool"))
    assert between, "the pool is too large: nobody was preempted between two chunks"


@pytest.mark.parametrize("name", LANES)
def test_who_waits_for_pages_holds_none(open_lane: OpenLane, name: str) -> None:
    """Its prefix is in the cache, the rest does not fit yet: every step looks for both again."""
    lane = open_lane(name)
    first, other = plain(ROWS, (24, 32), (20, 20))
    prompt = (*first.prompt_token_ids, *ROWS.prompt(24, 5))
    second = replace(first, request_id="second", prompt_token_ids=prompt, arrival_step=4)
    requests = (first, other, second)
    run = lane.run(requests, family=ROWS.family, page_size=4, num_pages=tight_pool(requests, 4, 3, 1))
    assert run.of("second").usage.cached_tokens > 0
    begun = next(s.step for s in run.steps for d in s.deltas if d.request_id == "second" and d.token_ids)
    assert begun > second.arrival_step + 2, "the pool is too large: it was let in at once"
    check(kv_1(run))


@pytest.mark.parametrize("name", [*LANES, "STANDALONE"])
def test_the_next_turn_finds_the_last_one(open_lane: OpenLane, name: str) -> None:
    """Every full page of a finished request whose rows are final is in the prefix cache: all but that of the last
    token, which was no input."""
    lane = open_lane(name)
    for cap in range(24, 28):
        (turn,) = plain(ROWS, (8,), (cap,))
        with lane.start(family=ROWS.family, page_size=4) as engine:
            said = (*turn.prompt_token_ids, *engine.run((turn,)).completions[0].token_ids)
            next_turn = replace(turn, request_id="next", prompt_token_ids=(*said, 1, 2))
            cached = engine.run((next_turn,)).completions[0].usage.cached_tokens
        assert cached == (len(said) - 1) // 4 * 4, f"{len(said)} tokens"


@pytest.mark.parametrize("name", LANES)
def test_no_more_run_than_may(open_lane: OpenLane, name: str) -> None:
    lane = open_lane(name)
    requests = plain(ROWS, (3, 4, 5, 6, 7), (9, 8, 7, 6, 9))
    run = lane.run(requests, family=ROWS.family, max_running=2)
    last = {done.request_id: 0 for done in run.completions}
    first: dict[str, int] = {}
    for step in run.steps:
        for delta in step.deltas:
            first.setdefault(delta.request_id, step.step)
            last[delta.request_id] = step.step
    for step in run.steps:
        running = [name for name, begun in first.items() if begun <= step.step < last[name]]
        assert len(running) <= 2, f"step {step.step}: {running}"
