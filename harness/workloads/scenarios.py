"""Scripted batches, the same every time: each puts an engine into one situation on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.contract import Request, SamplingParams
from harness.workloads.strategies import Batch, tight_pool
from harness.workloads.vocabulary import Vocabulary


def plain(
    vocabulary: Vocabulary, lengths: tuple[int, ...], new_tokens: tuple[int, ...], seed: int = 0, **flags: Any
) -> tuple[Request, ...]:
    """Greedy requests q0, q1, ... of the given prompt lengths and caps; `flags` are fields of `Request`."""
    return tuple(
        Request(
            request_id=f"q{i}",
            prompt_token_ids=vocabulary.prompt(length, 100 * seed + i),
            sampling=SamplingParams(max_new_tokens=cap),
            **flags,
        )
        for i, (length, cap) in enumerate(zip(lengths, new_tokens, strict=True))
    )


def _setup(**changes: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(changes.items()))


def ragged_eight(vocabulary: Vocabulary, seed: int = 0) -> Batch:
    """Eight requests of different lengths that all run at once and watch their hidden states."""
    lengths, caps = (1, 2, 3, 4, 7, 13, 24, 40), (9, 18, 6, 21, 12, 15, 20, 17)
    return Batch(plain(vocabulary, lengths, caps, seed, return_hidden_states=True), k=3)


def ragged_five(vocabulary: Vocabulary, seed: int = 0) -> Batch:
    """The same, smaller: for comparing many ways to run one batch."""
    return Batch(plain(vocabulary, (1, 2, 5, 11, 21), (10, 7, 12, 9, 11), seed, return_hidden_states=True), k=3)


def short_prompts(vocabulary: Vocabulary, seed: int = 0) -> Batch:
    """Prompts of 1 and 2 tokens, shorter than a draft; one request ends with its first token."""
    requests = plain(vocabulary, (1, 1, 2, 2, 1, 3), (12, 1, 2, 13, 7, 16), seed, return_hidden_states=True)
    return Batch(requests, k=4)


def tiny_pool_preemption(vocabulary: Vocabulary, seed: int = 0) -> Batch:
    """Six requests in a pool that holds the longest and little more: all but one must be preempted and resumed."""
    requests = plain(vocabulary, (6, 9, 3, 12, 5, 8), (20, 18, 20, 16, 20, 19), seed, return_hidden_states=True)
    return Batch(requests, k=3, changes=_setup(page_size=4, num_pages=tight_pool(requests, 4, 3, 3)))


def chunked_prefill(vocabulary: Vocabulary, seed: int = 0) -> Batch:
    """Prompts of several chunks, whose borders fall everywhere, beside requests that are decoding already."""
    requests = plain(vocabulary, (40, 33, 17, 1, 29), (10, 12, 14, 20, 11), seed, return_hidden_states=True)
    return Batch(requests, k=3, changes=_setup(chunk_size=7, page_size=4))


def warm_prefix(vocabulary: Vocabulary, seed: int = 0) -> Batch:
    """Requests that share a trunk of 32 tokens, run twice: the second time their prefixes are cached."""
    trunk = vocabulary.prompt(32, 100 * seed + 50)
    requests = tuple(
        Request(
            request_id=f"q{i}",
            prompt_token_ids=trunk[:cut],
            sampling=SamplingParams(max_new_tokens=cap),
        )
        for i, (cut, cap) in enumerate(((32, 14), (31, 15), (20, 16), (8, 17), (29, 18)))
    )
    return Batch(requests, k=3, changes=_setup(page_size=4), warm=True)


def forked_prefix(vocabulary: Vocabulary, seed: int = 0) -> Batch:
    """Requests that share two pages and part right behind them, one after another: each finds the pages of the first,
    and what depends on the token behind a page must not be found with it."""
    trunk = vocabulary.prompt(8, 100 * seed + 70)
    tails = {tail[0]: tail for tail in (vocabulary.prompt(3, 100 * seed + 71 + i) for i in range(20))}
    requests = tuple(
        Request(
            request_id=f"q{i}",
            prompt_token_ids=trunk + tail,
            sampling=SamplingParams(max_new_tokens=12),
            arrival_step=3 * i,
        )
        for i, tail in enumerate(list(tails.values())[:3])
    )
    return Batch(requests, k=3, changes=_setup(page_size=4))


def abort_storm(vocabulary: Vocabulary, seed: int = 0) -> Batch:
    """Eight requests that arrive one after another; every other one is aborted, at once, soon or in mid-flight."""
    aborts = {0: 3, 2: 1, 4: 6, 6: 3}
    requests = tuple(
        Request(
            request_id=f"q{i}",
            prompt_token_ids=vocabulary.prompt((5, 2, 17, 1, 9, 30, 3, 4)[i], 100 * seed + i),
            sampling=SamplingParams(max_new_tokens=15),
            return_hidden_states=True,
            arrival_step=i // 2,
            abort_step=aborts.get(i),
        )
        for i in range(8)
    )
    return Batch(requests, k=3, changes=_setup(page_size=4, chunk_size=16))


def mixed_flags(vocabulary: Vocabulary, seed: int = 0) -> Batch:
    """Every flag once in one batch, and a request without any."""
    lengths = (4, 9, 2, 6, 1, 12, 5, 3, 7, 4, 8, 2)
    prompts = [vocabulary.prompt(length, 100 * seed + 10 + i) for i, length in enumerate(lengths)]
    bad, allowed = (vocabulary.continue_(prompts[i], 12) for i in (9, 10))
    stream = vocabulary.continue_(prompts[4], 12)
    stop = vocabulary.continue_(prompts[5], 12)
    flags: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({}, True),
        ({"logprobs": 3}, False),
        ({"prompt_logprobs": 2, "logprobs": 0}, True),
        ({"stop_token_ids": (stream[7],), "min_new_tokens": 4}, False),
        ({"stop": (vocabulary.text(stop[5:7]),)}, True),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}, False),
        ({"logit_bias": ((vocabulary.ordinary[-1], 30.0),)}, False),
        ({"temperature": 1.0, "seed": 7}, False),
        ({"bad_words": ((bad[2], bad[3]), (bad[6],))}, True),
        ({"allowed_token_ids": tuple(sorted(set(allowed[:7])))}, False),
        ({"regex": "[0-9a-e]{4}([0-4]|[a-e][0-9])*", "logprobs": 1}, True),
    ]
    requests = [
        Request(
            request_id=f"q{i}",
            prompt_token_ids=prompts[i],
            sampling=SamplingParams(max_new_tokens=12, **fields),
            return_hidden_states=hidden,
        )
        for i, (fields, hidden) in enumerate(flags)
    ]
    pooled = plain(vocabulary, (8,), (12,), seed, pooled_hidden="both")
    requests += [replace(request, request_id=f"q{len(requests)}") for request in pooled]
    return Batch(tuple(requests), k=3, changes=_setup(max_running=len(requests)))


def overlap_buckets(vocabulary: Vocabulary, seed: int = 0) -> Batch:
    """Overlap scheduling with padded batches; requests come and go, so that padding changes from step to step."""
    requests = tuple(
        Request(
            request_id=f"q{i}",
            prompt_token_ids=vocabulary.prompt((3, 11, 1, 20, 6)[i], 100 * seed + i),
            sampling=SamplingParams(max_new_tokens=(5, 17, 9, 14, 11)[i]),
            return_hidden_states=i % 2 == 0,
            arrival_step=(0, 0, 2, 3, 3)[i],
        )
        for i in range(5)
    )
    return Batch(requests, k=2, changes=_setup(overlap=True, batch_buckets=(2, 4, 8)))


def repeats(vocabulary: Vocabulary, seed: int = 0) -> Batch:
    """Prompts that hold a stretch of what will be said, and its beginning again behind it: what is looked up there is
    right, right up to the end of the stretch, or not to be found."""
    shapes = ((1, 1, 6), (2, 1, 9), (6, 2, 12), (9, 1, 18), (10, 1, 14), (11, 1, 15), (14, 3, 20), (20, 1, 22))
    requests = []
    for i, (length, again, cap) in enumerate(shapes):
        start, between = vocabulary.prompt(1, 100 * seed + i), vocabulary.prompt(2, 100 * seed + i)[1:]
        stretch = start + vocabulary.continue_(start, length - 1)
        prompt = stretch + between + stretch[:again]
        requests.append(
            Request(request_id=f"q{i}", prompt_token_ids=prompt, sampling=SamplingParams(max_new_tokens=cap))
        )
    return Batch(tuple(requests), k=3)


def one_token(vocabulary: Vocabulary, k: int) -> Batch:
    """Requests that say one token over and over, after prompts of nothing else: whoever drafts from the text alone is
    right, and has k tokens to draft."""
    requests = tuple(
        Request(
            request_id=f"q{i}",
            prompt_token_ids=(token,) * (k + 4 + 3 * i),
            sampling=SamplingParams(max_new_tokens=9 + 2 * i, logit_bias=((token, 100.0),)),
        )
        for i, token in enumerate(vocabulary.ordinary[:5])
    )
    return Batch(requests, k=k)


SCENARIOS = {
    make.__name__: make
    for make in (
        ragged_eight,
        short_prompts,
        tiny_pool_preemption,
        chunked_prefill,
        warm_prefix,
        abort_storm,
        mixed_flags,
        overlap_buckets,
    )
}
