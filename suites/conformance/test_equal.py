"""EQUAL: speculation, and every other way of running a request, change nothing that the user sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from harness.contract import Request, Run, SamplingParams
from harness.invariants import Violation, equal_1, equal_2
from harness.invariants.compare import first_difference, token_at
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.laws import processors
from harness.workloads.lives import one_after_another
from harness.workloads.scenarios import plain, ragged_eight, ragged_five, tiny_pool_preemption
from harness.workloads.strategies import Batch
from harness.workloads.vocabulary import Vocabulary
from suites.conformance.arrange import (
    ANY_BATCH,
    LAW_IDS,
    ROW_BATCH,
    ROWS,
    WALK,
    RecordExamples,
    alone,
    scenarios,
    watched,
)
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=6.2, stage="cpu", needs="cpu")

LAW = vocabulary("law")
STRONG: dict[str, dict[str, Any]] = {
    "discouraged": {"repetition_penalty": 3.0},
    "encouraged": {"repetition_penalty": 0.3},
    "again_and_again": {"presence_penalty": -2.0, "frequency_penalty": 0.5},
}
"""Penalties that change what comes, not only how likely it is."""

SETUPS: dict[str, dict[str, Any]] = {
    "page_1": {"page_size": 1, "prefix_cache": False},
    "page_4": {"page_size": 4, "chunk_size": 16},
    "chunk_1": {"chunk_size": 1},
    "chunk_3": {"chunk_size": 3},
    "overlap": {"overlap": True},
    "buckets": {"batch_buckets": (8,)},
    "two_at_a_time": {"max_running": 2, "batch_buckets": (2, 4)},
    "warm": {"warm": True, "page_size": 4},
    "everything": {"page_size": 4, "chunk_size": 5, "overlap": True, "batch_buckets": (4, 8), "warm": True},
}


def strayed(run: Run, vocabulary: Vocabulary) -> list[Violation]:
    """Where completions leave the closed form of their target."""
    out = []
    for request in run.requests:
        done = [c.token_ids for c in run.completions if c.request_id == request.request_id]
        said = done[0] if done else ()
        right = vocabulary.continue_(request.prompt_token_ids, request.sampling.max_new_tokens)
        row = first_difference(said, right)
        if row is not None:
            violation = Violation(
                invariant="EQUAL-1",
                message="token is not what the weights say" if done else "request has no completion",
                request_id=request.request_id,
                position=len(request.prompt_token_ids) + row,
                row=row,
                expected=token_at(right, row),
                got=token_at(said, row),
            )
            out.append(violation)
    return out


@pytest.mark.invariant("EQUAL-1")
@given(batch=ANY_BATCH)
def test_with_and_without(lane: Lane, batch: Batch) -> None:
    lane.check(equal_1(lane.run_batch(batch), lane.run_batch(batch, speculative=False)))


@pytest.mark.invariant("EQUAL-1")
def test_closed_form(lane: Lane, record_examples: RecordExamples) -> None:
    """The control arm: bare greedy requests must say what the weights say, with or without a drafter."""
    for make in (ragged_eight, tiny_pool_preemption):
        for words in (WALK, ROWS):
            batch = make(words)
            run = lane.run_batch(batch, family=words.family)
            lane.check(strayed(run, words))
    record_examples(4)


@pytest.mark.invariant("EQUAL-1")
def test_with_and_without_in_scenarios(lane: Lane, record_examples: RecordExamples) -> None:
    for batch, run in scenarios(lane):
        lane.check(equal_1(run, lane.run_batch(batch, speculative=False)))
        record_examples(1)


def processed(trunk: tuple[int, ...] = ()) -> Batch:
    """A request for each processor where tokens are so close that it decides what comes. Where the target is sure of
    itself a penalty that is forgotten, or counts too much, shows nothing."""
    requests = tuple(
        Request(
            request_id=name,
            prompt_token_ids=(*trunk, *LAW_IDS, *LAW.prompt(2, place)),
            sampling=SamplingParams(**{**fields, "temperature": 0.0, "max_new_tokens": 20}),
        )
        for place, (name, fields) in enumerate((processors(LAW_IDS) | STRONG).items())
    )
    return Batch(requests, k=3, changes=(("max_running", len(requests)),))


@pytest.mark.invariant("EQUAL-1")
def test_processors_with_and_without(lane: Lane) -> None:
    batch = processed()
    run = lane.run_batch(batch, family=LAW.family)
    lane.check(equal_1(run, lane.run_batch(batch, family=LAW.family, speculative=False)))


@pytest.mark.invariant("EQUAL-2")
def test_processors_behind_a_prefix_hit(lane: Lane) -> None:
    """What was not computed for a request is a part of its history as well."""
    batch = processed(LAW.prompt(9, 3))
    cold = lane.run_batch(batch, family=LAW.family)
    warm = lane.run_batch(replace(batch, warm=True), family=LAW.family, page_size=4)
    if lane.capabilities.grey_box:
        assert all(done.usage.cached_tokens >= 8 for done in warm.completions)
    lane.check(equal_2(cold, warm, name="warm"))


@pytest.mark.invariant("EQUAL-2")
def test_processors_behind_preemptions(lane: Lane) -> None:
    """What a resumed request has said stays its output: it does not come to be a part of its prompt."""
    lane.needs("preempt")
    batch = lane.fit(processed())
    setup: dict[str, Any] = {"family": LAW.family, "k": batch.k, **batch.setup}
    again_and_again = one_after_another(batch.requests, ["preempt"] * 4, start=2, gap=2)
    run = lane.run(batch.requests, actions=again_and_again, **setup)
    lane.check(equal_2(lane.run(batch.requests, **setup), run, name="preempted"))


@pytest.mark.invariant("EQUAL-1")
def test_bad_words_of_several_tokens(lane: Lane) -> None:
    """Pieces of what the target would say, of 2 to 5 tokens, so that they lie across drafts and blocks in every way."""
    lane.needs("bad_words")
    requests = []
    for length in range(2, 6):
        for start in range(4):
            prompt = WALK.prompt(3, start)
            said = WALK.continue_(prompt, 4 + start + length)
            sampling = SamplingParams(max_new_tokens=14, bad_words=(said[start : start + length],))
            requests.append(Request(request_id=f"{length}/{start}", prompt_token_ids=prompt, sampling=sampling))
    batch = Batch(tuple(requests), k=4, changes=(("max_running", len(requests)),))
    run = lane.run_batch(batch)
    lane.check(equal_1(run, lane.run_batch(batch, speculative=False)))


@pytest.mark.invariant("EQUAL-2")
@given(batch=ANY_BATCH)
def test_alone(lane: Lane, batch: Batch) -> None:
    run = lane.run_batch(batch)
    for request in batch.requests[:2]:
        lane.check(equal_2(run, alone(lane, batch, request), name="alone"))


@pytest.mark.invariant("EQUAL-2")
@given(batch=ROW_BATCH)
def test_any_schedule(lane: Lane, batch: Batch) -> None:
    run = lane.run_batch(batch, family=ROWS.family)
    plain = lane.run_batch(replace(batch, changes=(), warm=False), family=ROWS.family)
    lane.check(equal_2(run, plain, name="plain schedule"))


@pytest.mark.invariant("EQUAL-2")
def test_permuted(lane: Lane) -> None:
    batch = watched(ragged_five(ROWS))
    run = lane.run_batch(batch, family=ROWS.family)
    for order in (batch.requests[::-1], batch.requests[2:] + batch.requests[:2]):
        permuted = lane.run_batch(replace(batch, requests=order), family=ROWS.family)
        lane.check(equal_2(run, permuted, accept_lens=lane.speculative, name="permuted"))


@pytest.mark.invariant("EQUAL-2")
@pytest.mark.parametrize("name", tiered(SETUPS, "two_at_a_time", "everything"))
def test_setup(lane: Lane, name: str) -> None:
    """Accept lengths must not change either: the blocks begin at the same tokens."""
    batch = watched(ragged_five(ROWS))
    run = lane.run_batch(batch, family=ROWS.family)
    changes = {key: value for key, value in SETUPS[name].items() if key != "warm"}
    changed = replace(batch, changes=tuple(changes.items()), warm="warm" in SETUPS[name])
    variant = lane.run_batch(changed, family=ROWS.family)
    lane.check(equal_2(run, variant, accept_lens=lane.speculative, name=name))


@pytest.mark.invariant("EQUAL-2")
def test_warm_prefixes_are_found(lane: Lane) -> None:
    """Every full page of a prompt that ran before, but what must be left to compute. Prompts end before, at and behind
    a page border."""
    lane.grey_box()
    size, lengths = 4, range(3, 26, 2)
    requests = plain(ROWS, tuple(lengths), (5,) * len(lengths))
    batch = Batch(requests, k=3, changes=(("page_size", size),))
    run = lane.run_batch(batch, family=ROWS.family)
    warm = lane.run_batch(replace(batch, warm=True), family=ROWS.family)
    lane.check(equal_2(run, warm, accept_lens=lane.speculative, name="warm"))
    hits = {n: warm.of(request.request_id).usage.cached_tokens for request, n in zip(requests, lengths, strict=True)}
    assert hits == {n: (n - 1) // size * size for n in lengths}


@pytest.mark.invariant("EQUAL-2")
def test_preempted(lane: Lane) -> None:
    batch = watched(tiny_pool_preemption(ROWS))
    run = lane.run_batch(batch, family=ROWS.family)
    roomy = lane.run_batch(replace(batch, changes=()), family=ROWS.family)
    if lane.capabilities.grey_box:
        assert any(step.preempted for step in run.steps), "the scenario preempted nobody: its pool is too large"
    lane.check(equal_2(run, roomy, name="with a large pool"))


@pytest.mark.invariant("EQUAL-2")
def test_draft_length(lane: Lane, thorough: bool, record_examples: RecordExamples) -> None:
    batch = watched(ragged_five(ROWS))
    run = lane.run_batch(batch, family=ROWS.family)
    lengths = (1, 2, 4, 5, 7) if thorough else (1, 5)
    for k in lengths:
        lane.check(equal_2(run, lane.run_batch(replace(batch, k=k), family=ROWS.family), name=f"k={k}"))
    record_examples(len(lengths))
