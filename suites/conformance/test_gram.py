"""GRAM: under a grammar, with any drafter, an engine says what its target would under the same masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.contract import Request, Run, SamplingParams
from harness.invariants import equal_1, equal_2, finish_1, gram_1
from harness.oracles import History, canonical_grammar, following_ids, next_token_law, support
from harness.workloads.grammars import expected, grammar_drafters, grammatical, texts_of
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.strategies import Batch, tight_pool
from suites.conformance.arrange import WALK, RecordExamples
from suites.registration import suite

suite(seconds=3.6, stage="cpu", needs="cpu")

REQUESTS = grammatical(WALK)
LAW = vocabulary("law")
WIDE: dict[str, Any] = {"max_running": len(REQUESTS)}

SETUPS: dict[str, dict[str, Any]] = {
    "two_samples": {"k": 8, "overlap": True, "batch_buckets": (4, 24), **WIDE},
    "preempted": {"page_size": 4, "chunk_size": 5, "num_pages": tight_pool(REQUESTS, 4, 3, 6), "overlap": True},
}


def oracle(run: Run) -> Run:
    """The run as it must be: each law masked by the language of the grammar."""
    completions = tuple(expected(request, WALK.family) for request in run.requests)
    return replace(run, completions=completions, steps=(), counters=None)


def grammars(lane: Lane, requests: tuple[Request, ...] = REQUESTS) -> tuple[Request, ...]:
    lane.needs("regex", "json_schema")
    return lane.fit(Batch(requests, 3)).requests


def _agreed(lane: Lane, run: Run) -> Run:
    """Less the requests whose end depends on what an engine has declared to do otherwise."""
    other = {"dead_end", "short"} if lane.capabilities.dead_end == "goes_on" else set()
    other |= {"stop_id"} if lane.capabilities.stop_ids_end_grammars else set()
    requests = tuple(request for request in run.requests if request.request_id not in other)
    completions = tuple(done for done in run.completions if done.request_id not in other)
    return replace(run, requests=requests, completions=completions, steps=run.steps if not other else ())


@pytest.mark.invariant("GRAM-1")
def test_the_masked_law(lane: Lane, record_examples: RecordExamples) -> None:
    """Judged with its trace, and as the black box that shows no more than text."""
    for seed in range(lane.seeds):
        requests = grammars(lane, grammatical(WALK, seed))
        run = lane.run(requests, **WIDE)
        agreed = _agreed(lane, run)
        lane.check(gram_1(run, WALK.text) + finish_1(agreed, oracle(agreed), detokenize=WALK.text))
        lane.check(gram_1(replace(run, steps=(), counters=None)))
        record_examples(len(requests))


@pytest.mark.invariant("GRAM-1")
def test_a_grammar_alone_that_leads_nowhere(lane: Lane) -> None:
    """No other mask is in the batch that could have rows searched for what is left."""
    run = lane.run(tuple(r for r in grammars(lane) if r.request_id in ("dead_end", "free")), **WIDE)
    agreed = _agreed(lane, run)
    lane.check(gram_1(run, WALK.text) + finish_1(agreed, oracle(agreed), detokenize=WALK.text))


@pytest.mark.invariant("EQUAL-1", "GRAM-1")
def test_with_and_without(lane: Lane) -> None:
    requests = grammars(lane)
    lane.check(equal_1(lane.run(requests, **WIDE), lane.baseline(requests, **WIDE)))


@pytest.mark.invariant("GRAM-1")
@pytest.mark.parametrize("name", SETUPS)
def test_any_schedule(lane: Lane, name: str) -> None:
    """The matchers of neighbours must not get mixed up, nor lag behind what was launched. Half of the requests, in
    another order."""
    samples = 2 if name == "two_samples" else 1
    chosen = [replace(r, sampling=replace(r.sampling, n=samples)) for r in REQUESTS[::-2]]
    requests = grammars(lane, tuple(chosen))
    run = lane.run(requests, **SETUPS[name])
    if name == "preempted" and lane.capabilities.grey_box:
        assert any(step.preempted for step in run.steps), "the pool is too large: nobody was preempted"
    plain = lane.run(grammars(lane), **WIDE)
    twice = [replace(plain.of(r.request_id), index=index) for r in requests for index in range(r.sampling.n)]
    right = replace(plain, requests=requests, completions=tuple(twice), steps=())
    lane.check(gram_1(run, WALK.text) + equal_2(run, right, name=name))


@pytest.mark.invariant("GRAM-1")
@pytest.mark.drafters("CUSTOM")
@pytest.mark.parametrize("name", grammar_drafters(WALK, REQUESTS))
def test_drafts_that_tempt(lane: Lane, name: str) -> None:
    script = grammar_drafters(WALK, REQUESTS)[name]
    run = lane.run(grammars(lane), script=script, k=9, **WIDE)
    lane.check(gram_1(run, WALK.text) + finish_1(run, oracle(run), detokenize=WALK.text))


@pytest.mark.invariant("GRAM-1")
@pytest.mark.drafters("CUSTOM")
def test_right_drafts_are_all_accepted(lane: Lane) -> None:
    """Masks must forbid no draft that the grammar allows: every block is full, up to the end of the grammar."""
    lane.grey_box()
    script = grammar_drafters(WALK, REQUESTS)["right_then_eos"]
    run = lane.run(grammars(lane), script=script, k=4, **WIDE)
    for done in run.completions:
        assert done.accept_lens is not None
        assert all(length == 5 for length in done.accept_lens[:-1]), (done.request_id, done.accept_lens)
        assert sum(done.accept_lens) >= len(done.token_ids) - 1


SAMPLED: dict[str, dict[str, Any]] = {
    "digits": {"regex": "[0-4]{3,9}"},
    "pairs": {"regex": "([0-9][a-e])*", "top_p": 0.9, "temperature": 1.4},
    "bad": {"bad_words": ((3, 4), (5,), (6, 6, 7)), "repetition_penalty": 1.3},
    "allowed": {"allowed_token_ids": (0, 1, 3, 9), "top_k": 3},
    "greedy": {"regex": "[0-9]{5}a*", "temperature": 0.0},
    "free": {},
}


@pytest.mark.invariant("GRAM-1")
def test_sampled_tokens_have_a_chance(lane: Lane, record_examples: RecordExamples) -> None:
    """Greedy and sampled, masked and not, in one batch: each token lies in the support of its own masked law."""
    lane.needs("regex", "seed", "bad_words", "allowed_token_ids")
    requests = tuple(
        Request(
            request_id=f"{name}{seed}",
            prompt_token_ids=LAW.prompt(4, seed),
            sampling=SamplingParams(**{"temperature": 1.0, "seed": seed, "max_new_tokens": 12, **fields}),
        )
        for seed in range(lane.seeds)
        for name, fields in SAMPLED.items()
    )
    run = lane.run(requests, family="law")
    lane.check(gram_1(run, LAW.text))
    target = lane.target("law")
    for request in requests:
        output: tuple[int, ...] = ()
        grammar = canonical_grammar(request.sampling)
        for token in run.of(request.request_id).token_ids:
            ids = None
            if grammar is not None:
                ids = following_ids(grammar.after(LAW.text(output)), texts_of(target), (target.eos_token_id,))
            history = History(request.prompt_token_ids, output)
            logits = target.logprobs((*request.prompt_token_ids, *output)).numpy()
            assert token in support(next_token_law(logits, request.sampling, history, following_ids=ids))
            output = (*output, token)
    record_examples(len(requests))
