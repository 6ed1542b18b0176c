"""LOGP: every log probability is the target's own, whatever block its token came from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given

from harness.contract import Action, Request, Run, SamplingParams
from harness.invariants import logp_1
from harness.invariants.blocks import places
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import DraftMethod
from harness.workloads.laws import COIN_IDS, NUM_STEPS
from harness.workloads.scenarios import chunked_prefill, mixed_flags, plain, ragged_eight, tiny_pool_preemption
from harness.workloads.strategies import Batch, batches
from suites.conformance.arrange import (
    MakeBatch,
    RecordExamples,
    draft_methods,
    offering,
    run_sampled,
    sampled_batch,
    scenarios,
    watched,
)
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=2.6, stage="cpu", needs="cpu")

LAW = vocabulary("law")
SCENES = [
    ("law", ragged_eight),
    ("law-eos", mixed_flags),
    ("law-eos", tiny_pool_preemption),
    ("census", chunked_prefill),
]


@pytest.mark.invariant("LOGP-1")
@given(batch=batches(LAW, timed=True))
def test_rows_equal_the_law(lane: Lane, batch: Batch) -> None:
    lane.needs("logprobs")
    run = lane.run_batch(batch, family="law")
    lane.check(logp_1(offering(run, "logprobs"), lane.target("law").logprobs))


@pytest.mark.invariant("LOGP-1")
@pytest.mark.parametrize(("family", "make"), tiered(SCENES, ("law-eos", mixed_flags), ("census", chunked_prefill)))
def test_rows_equal_the_law_in_scenarios(lane: Lane, family: str, make: MakeBatch) -> None:
    lane.needs("logprobs")
    for _, run in scenarios(lane, vocabulary(family), [make], watched):
        lane.check(logp_1(run, lane.target(family).logprobs))


@pytest.mark.invariant("LOGP-1")
@pytest.mark.parametrize("method", draft_methods("greedy", "probabilistic"))
def test_rows_of_sampled_requests_in_every_place_of_a_block(lane: Lane, method: DraftMethod) -> None:
    """Accepted, recovered and bonus tokens, at each depth, of requests with every processor; prompts and n best too."""
    run = run_sampled(lane, sampled_batch(lane, method), method)
    lane.check(logp_1(run, lane.target("law").logprobs))
    # Where the coins are the engine's own, nobody can say which places they reach.
    if lane.speculative and lane.capabilities.grey_box:
        depth = NUM_STEPS if lane.spec.max_k is None else min(NUM_STEPS, lane.spec.max_k)
        due = {*((place, kind) for place in range(depth) for kind in ("accepted", "recovered")), (depth, "bonus")}
        assert covered(run) >= due


def covered(run: Run) -> set[tuple[int, str]]:
    """Places in the block, and what came there, of tokens with a logprob row."""
    return {
        (place.place, place.kind)
        for done in run.completions
        if done.logprobs is not None
        for place in places(run, done)
    }


ALONE: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.8, "frequency_penalty": 0.35},
    "logit_bias": {"logit_bias": ((3, 4.0), (7, -2.0))},
    "min_new_tokens": {"min_new_tokens": 5, "stop_token_ids": (3, 7)},
    "allowed_token_ids": {"allowed_token_ids": (1, 3, 7, 9)},
    "bad_words": {"bad_words": ((3,), (7, 9))},
    "regex": {"regex": "[0-9a-d]{9}"},
    "filters": {"temperature": 1.3, "seed": 4, "top_k": 4, "top_p": 0.8, "min_p": 0.1},
}


@pytest.mark.invariant("LOGP-1")
def test_each_processor_by_itself(lane: Lane, record_examples: RecordExamples) -> None:
    """What a processor does to the logits in place is hidden where another one has made a copy before."""
    lane.needs("logprobs")
    with lane.start(family="law") as engine:
        for fields in ALONE.values():
            sampling = SamplingParams(max_new_tokens=7, logprobs=3, **fields)
            request = Request(request_id="asks", prompt_token_ids=LAW.prompt(3, 1), sampling=sampling)
            run = engine.run(lane.fit_requests([request]))
            lane.check(logp_1(run, lane.target("law").logprobs))
            record_examples(1)


@pytest.mark.invariant("LOGP-1")
def test_a_prefill_behind_a_resumed_request(lane: Lane) -> None:
    """In one pass a request that has its next token already, and gets no row, and one that is given its first token."""
    lane.needs("logprobs", "preempt")
    resumed, late = plain(LAW, (6, 5), (8, 6))
    requests = [replace(r, sampling=replace(r.sampling, logprobs=2)) for r in (resumed, replace(late, arrival_step=3))]
    run = lane.run(requests, family="law", actions=[Action(step=3, name="preempt", value="q0#0")])
    lane.check(logp_1(run, lane.target("law").logprobs))


@pytest.mark.invariant("LOGP-1")
def test_equal_probabilities_are_no_order(lane: Lane) -> None:
    """In the family "coin" thirteen tokens are equally unlikely: three of them are among the six best, whichever."""
    lane.needs("logprobs")
    sampling = SamplingParams(max_new_tokens=6, logprobs=6)
    requests = [Request(request_id=f"q{i}", prompt_token_ids=COIN_IDS[i:], sampling=sampling) for i in range(2)]
    run = lane.run(requests, family="coin", k=NUM_STEPS)
    law = lane.target("coin").logprobs
    lane.check(logp_1(run, law))
    ties = torch.unique(law(COIN_IDS), return_counts=True)[1].max()
    assert int(ties) == 13


@pytest.mark.invariant("LOGP-1")
def test_as_many_of_the_best_as_each_has_asked_for(lane: Lane) -> None:
    """Another number for each, 0 and nothing among them, of the prompt and of the output; the second time all of the
    prompts are in the prefix cache, and their rows come all the same."""
    lane.needs("logprobs", "prompt_logprobs")
    requests = [
        replace(request, sampling=replace(request.sampling, prompt_logprobs=prompt, logprobs=output))
        for request, prompt, output in zip(
            plain(LAW, (9, 12, 9, 3, 10), (5, 4, 6, 5, 4)), (1, 0, None, 4, 0), (0, 3, 1, None, 5), strict=True
        )
    ]
    run = lane.run(requests, family="law", warm=True, page_size=4)
    lane.check(logp_1(run, lane.target("law").logprobs))
    if lane.capabilities.grey_box:
        assert run.of("q2").usage.cached_tokens > 0, "nothing was cached"
