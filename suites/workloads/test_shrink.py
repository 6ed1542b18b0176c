"""Shrinking keeps what fails and nothing else, ends, and keeps to its time."""

from __future__ import annotations

import time
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from harness.contract import Request, SamplingParams
from harness.workloads.shrink import shrink
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")


def request(name: str, prompt: int = 12, new: int = 20, **sampling: object) -> Request:
    params = SamplingParams(**{"max_new_tokens": new, **sampling})  # type: ignore[arg-type]
    return Request(request_id=name, prompt_token_ids=tuple(range(1, prompt + 1)), sampling=params)


FULL = SamplingParams(max_new_tokens=9, min_new_tokens=4, temperature=1.0, seed=3, logprobs=2, stop=("x",), n=2)


def test_what_does_not_matter_goes() -> None:
    """It takes a sampled request with at least 7 tokens beside one whose prompt ends in 12 and has 3 tokens or more."""

    def fails(batch: tuple[Request, ...]) -> bool:
        hot = any(one.sampling.temperature > 0 and one.sampling.max_new_tokens >= 7 for one in batch)
        return hot and any(one.prompt_token_ids[-3:] == (10, 11, 12) for one in batch)

    batch = (*(request(f"idle{i}") for i in range(5)), request("hot", prompt=4, temperature=1.0, seed=3, logprobs=2))
    hot, other = sorted(shrink(batch, fails, 60.0), key=lambda one: one.request_id)
    assert (hot.request_id, hot.prompt_token_ids, hot.sampling) == (
        "hot",
        (4,),
        SamplingParams(max_new_tokens=7, temperature=1.0),
    )
    assert (other.prompt_token_ids, other.sampling) == ((10, 11, 12), SamplingParams(max_new_tokens=1))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_the_smallest_of_what_always_fails_is_one_token_each_way(lengths: list[int]) -> None:
    batch = tuple(replace(request(f"q{i}", prompt=n), sampling=FULL) for i, n in enumerate(lengths))
    (only,) = shrink(batch, lambda _: True, 60.0)
    assert (len(only.prompt_token_ids), only.sampling) == (1, SamplingParams(max_new_tokens=1))


def test_it_keeps_to_its_time() -> None:
    def slow(_batch: tuple[Request, ...]) -> bool:
        time.sleep(0.05)
        return False

    started = time.monotonic()
    batch = tuple(request(f"q{i}") for i in range(20))
    assert shrink(batch, slow, 0.2) == batch
    assert time.monotonic() - started < 0.5
