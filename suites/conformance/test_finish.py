"""FINISH: where a request ends, and why, does not depend on how many tokens a step yields."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from harness.contract import Request, Run
from harness.invariants import finish_1, finish_2, finish_2_alone, finish_2_minimum
from harness.oracles.finish import expected_completion
from harness.workloads.known import greedy_without, known_family, vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.strategies import Batch
from harness.workloads.sweeps import (
    WIDE,
    Stop,
    caps,
    depth,
    ends_of_sequence,
    minimum_lengths,
    repeated_token,
    stops_and_caps,
    two_stops,
)
from suites.conformance.arrange import ANY_BATCH, WALK, RecordExamples, capped
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=4.9, stage="cpu", needs="cpu")

PERFECT = vocabulary("walk-perfect")
"""Full blocks: a stop at every position is a stop at every place of a block."""

REACHES_EOS = vocabulary("walk-eos")
WITHOUT_CHECKPOINT = [name for name, spec in LANES.items() if spec.without_checkpoint]


def oracle(run: Run, family: str) -> Run:
    """What the run must be: the endless stream of the target, ended as each request says. Where `ignore_eos` bans EOS,
    the stream of such a request is the one without it."""
    words, target = vocabulary(family), known_family(family).target

    def stream(request: Request) -> tuple[int, ...]:
        prompt, size = request.prompt_token_ids, request.sampling.max_new_tokens
        if request.sampling.ignore_eos and run.capabilities.ignore_eos == "ban":
            return greedy_without(target, prompt, size, frozenset({words.eos_token_id}))
        return words.continue_(prompt, size)

    completions = [
        expected_completion(
            request,
            stream(request),
            eos_token_ids=(words.eos_token_id,),
            detokenize=words.text,
        )
        for request in run.requests
    ]
    return replace(run, completions=tuple(completions), steps=(), counters=None)


def sweep(lane: Lane, family: str, k: int, requests: tuple[Request, ...]) -> None:
    run = lane.run(lane.fit(Batch(requests, k)).requests, family=family, k=k, **WIDE)
    lane.check(finish_1(run, oracle(run, family), detokenize=vocabulary(family).text))


@pytest.mark.invariant("FINISH-1")
@pytest.mark.parametrize("k", tiered(range(1, 6), 3))
def test_every_stop_and_cap(lane: Lane, k: int, record_examples: RecordExamples) -> None:
    lane.needs("stop_token_ids")
    requests = stops_and_caps(PERFECT, k, "id")
    sweep(lane, PERFECT.family, k, requests)
    record_examples(len(requests))


@pytest.mark.invariant("FINISH-1")
@pytest.mark.parametrize("stop", tiered(["id", "string", "long_string"], "id", "long_string"))
def test_every_stop_and_cap_with_rejections(lane: Lane, stop: Stop, record_examples: RecordExamples) -> None:
    lane.needs("stop_token_ids" if stop == "id" else "stop")
    requests = stops_and_caps(WALK, 3, stop)
    sweep(lane, WALK.family, 3, requests)
    record_examples(len(requests))


@pytest.mark.invariant("FINISH-1")
def test_two_stops_in_every_order(lane: Lane, record_examples: RecordExamples) -> None:
    lane.needs("stop_token_ids", "stop")
    requests = two_stops(PERFECT, 3)
    sweep(lane, PERFECT.family, 3, requests)
    record_examples(len(requests))


@pytest.mark.invariant("FINISH-1")
@pytest.mark.parametrize("k", tiered([1, 4], 4))
def test_every_end_of_sequence(lane: Lane, k: int, record_examples: RecordExamples) -> None:
    requests = ends_of_sequence(REACHES_EOS, k)
    sweep(lane, REACHES_EOS.family, k, requests)
    record_examples(len(requests))


@pytest.mark.invariant("FINISH-1")
@given(batch=ANY_BATCH)
def test_any_batch(lane: Lane, batch: Batch) -> None:
    lane.check(finish_1(lane.run_batch(batch), lane.run_batch(batch, speculative=False), detokenize=WALK.text))


@pytest.mark.invariant("FINISH-2")
@pytest.mark.parametrize("k", tiered([1, 3, 4], 3))
def test_every_cap_is_a_prefix(lane: Lane, k: int, record_examples: RecordExamples) -> None:
    short = caps(WALK, k)
    long = tuple(capped(request, depth(k)) for request in short)
    run, longer = (lane.run(requests, k=k, **WIDE) for requests in (short, long))
    lane.check(finish_2(run, longer))
    record_examples(len(short))


@pytest.mark.invariant("FINISH-2")
def test_every_minimum_length(lane: Lane, record_examples: RecordExamples) -> None:
    lane.needs("stop_token_ids", "min_new_tokens")
    requests = lane.fit(Batch(minimum_lengths(WALK, 3), 3)).requests
    run, baseline = lane.run(requests, **WIDE), lane.baseline(requests, **WIDE)
    free = lane.run([replace(r, sampling=replace(r.sampling, min_new_tokens=0)) for r in requests], **WIDE)
    lane.check(finish_2_alone(run) + finish_2_minimum(run, free) + finish_1(run, baseline))
    record_examples(len(requests))


@pytest.mark.invariant("FINISH-1", "FINISH-2")
@pytest.mark.drafters(*WITHOUT_CHECKPOINT)
def test_every_end_of_a_text_that_is_drafted_right(lane: Lane, record_examples: RecordExamples) -> None:
    """What looks its drafts up has none in the texts above, and so no block of several tokens that an end could cut.
    ACCEPT-2 holds that all of them are accepted in this one."""
    lane.needs("logit_bias", "stop")
    requests = repeated_token(WALK, 3)
    longest = tuple(capped(request, depth(3)) for request in requests)
    run, longer = (lane.run(some, **WIDE) for some in (requests, longest))
    lane.check(finish_1(run, lane.baseline(requests, **WIDE), detokenize=WALK.text) + finish_2(run, longer))
    record_examples(len(requests))


@pytest.mark.invariant("FINISH-2")
@given(batch=ANY_BATCH)
def test_any_batch_cut_short(lane: Lane, batch: Batch) -> None:
    requests = tuple(capped(request, 1 + request.sampling.max_new_tokens // 2) for request in batch.requests)
    calm = replace(batch, requests=requests)
    lane.check(finish_2(lane.run_batch(calm), lane.run_batch(batch)))
