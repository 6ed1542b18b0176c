"""What is drawn stays inside its bounds, and covers what it promises."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from harness.contract import Request
from harness.workloads.known import vocabulary
from harness.workloads.scenarios import SCENARIOS, tiny_pool_preemption
from harness.workloads.strategies import MAX_NEW_TOKENS, MAX_REQUESTS, Batch, batches, tight_pool
from harness.workloads.sweeps import caps, depth, ends_of_sequence, minimum_lengths, stops_and_caps, two_stops
from suites.registration import suite

suite(seconds=2, stage="cpu", needs="cpu")

WALK = vocabulary("walk")
FINISHES = ("stop_token_ids", "stop", "min_new_tokens", "ignore_eos")
MASKS = ("bad_words", "allowed_token_ids")


@given(batch=batches(WALK, timed=True))
def test_batches_are_small_and_ordinary(batch: Batch) -> None:
    assert 1 <= len(batch.requests) <= MAX_REQUESTS
    assert len({request.request_id for request in batch.requests}) == len(batch.requests)
    for request in batch.requests:
        assert request.sampling.max_new_tokens <= MAX_NEW_TOKENS
        assert set(request.prompt_token_ids) <= set(WALK.ordinary)
        assert len(request.prompt_token_ids) <= 43


def test_batches_cover_what_they_promise() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=120, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(batch=batches(WALK, timed=True))
    def look(batch: Batch) -> None:
        seen.update(list(batch.setup))
        seen.update(["warm"] if batch.warm else [])
        seen.update(["shared"] if shares_a_prefix(batch.requests) else [])
        for request in batch.requests:
            sampling = request.sampling
            seen.update(["short"] if len(request.prompt_token_ids) <= 4 else ["long"])
            seen.update(["hidden"] if request.return_hidden_states else [])
            seen.update(["abort"] if request.abort_step is not None else [])
            seen.update(["late"] if request.arrival_step else [])
            for name in (*FINISHES, "logit_bias", *MASKS):
                seen.update([name] if getattr(sampling, name) else [])
            for name in ("logprobs", "prompt_logprobs"):
                seen.update([name] if getattr(sampling, name) is not None else [])
            seen.update(["penalties"] if sampling.frequency_penalty or sampling.presence_penalty else [])
            seen.update(["n"] if sampling.n > 1 else [])

    look()
    setup = {"page_size", "chunk_size", "overlap", "prefix_cache", "max_running", "batch_buckets", "num_pages"}
    flags = {*FINISHES, *MASKS, "logit_bias", "logprobs", "prompt_logprobs"}
    others = {"warm", "shared", "short", "long", "hidden", "abort", "late", "penalties", "n"}
    rare = {name: seen[name] for name in setup | flags | others if seen[name] < 5}
    assert rare == {}


def shares_a_prefix(requests: tuple[Request, ...]) -> bool:
    heads = [request.prompt_token_ids[:4] for request in requests if len(request.prompt_token_ids) >= 4]
    return len(set(heads)) < len(heads)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("family", ["walk", "law", "census"])
def test_scenarios_are_the_same_every_time(name: str, family: str) -> None:
    words = vocabulary(family)
    make = SCENARIOS[name]
    assert make(words, 1) == make(words, 1)
    assert make(words, 1).requests != make(words, 2).requests
    assert all(set(request.prompt_token_ids) <= set(words.ordinary) for request in make(words).requests)


def test_a_tight_pool_holds_one_request_and_not_all() -> None:
    batch = tiny_pool_preemption(WALK)
    assert dict(batch.changes)["num_pages"] == tight_pool(batch.requests, 4, batch.k, 3)
    whole = sum(len(r.prompt_token_ids) + r.sampling.max_new_tokens for r in batch.requests)
    assert dict(batch.changes)["num_pages"] * 4 < whole


@pytest.mark.parametrize("k", range(1, 6))
def test_sweeps_are_complete(k: int) -> None:
    size = depth(k)
    requests = stops_and_caps(WALK, k, "id")
    assert len(requests) == size * size
    for request in requests:
        stream = WALK.continue_(request.prompt_token_ids, size)
        assert stream.count(request.sampling.stop_token_ids[0]) == 1
    positions = {(r.sampling.stop_token_ids, r.sampling.max_new_tokens) for r in requests}
    assert len(positions) == size * size
    assert len(two_stops(WALK, k)) == size * size
    assert len(minimum_lengths(WALK, k)) == size * (size + 1)
    assert {r.sampling.max_new_tokens for r in caps(WALK, k)} == set(range(1, size + 1))


def test_end_of_sequence_falls_on_every_position() -> None:
    words = vocabulary("walk-eos")
    size = depth(3)
    requests = ends_of_sequence(words, 3)
    positions = {words.continue_(r.prompt_token_ids, size).index(words.eos_token_id) for r in requests}
    assert positions == set(range(size))
    assert len(requests) == size * size * 3
