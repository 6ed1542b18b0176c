"""Exhaustive sweeps over where a request may end: every stop position against every length cap, inside every block.

Many combinations share one engine run. `depth` output tokens reach over the token of the prefill and two full blocks.
"""

from __future__ import annotations

from typing import Any, Literal

from harness.contract import Request, SamplingParams
from harness.workloads.vocabulary import Vocabulary

Stop = Literal["id", "string", "long_string"]
WIDE: dict[str, Any] = {"max_running": 64, "context_length": 64}
"""Set-up fields that let a sweep run in few steps."""


def depth(k: int) -> int:
    return 1 + 2 * (k + 1)


def _walk(vocabulary: Vocabulary, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt whose continuation repeats no token for `length` tokens, and that continuation."""
    for token in vocabulary.ordinary:
        stream = vocabulary.continue_((token,), length)
        if len(set(stream)) == length and vocabulary.eos_token_id not in stream:
            return (token,), stream
    raise ValueError(f"length={length}: the {vocabulary.family} family repeats itself sooner; sweep fewer tokens")


def stops_and_caps(vocabulary: Vocabulary, k: int, stop: Stop) -> tuple[Request, ...]:
    """One request for each stop at output position p and each cap m, both over all of `depth(k)`.

    A `long_string` is three characters long and ends at p, so it lies across a block border for some p.
    """
    size = depth(k)
    prompt, stream = _walk(vocabulary, size)
    requests = []
    for position in range(size):
        start = max(0, position - 2) if stop == "long_string" else position
        word = vocabulary.text(stream[start : position + 1])
        flags: dict[str, Any] = {"stop_token_ids": (stream[position],)} if stop == "id" else {"stop": (word,)}
        for cap in range(1, size + 1):
            sampling = SamplingParams(max_new_tokens=cap, **flags)
            requests.append(Request(request_id=f"p{position}-m{cap}", prompt_token_ids=prompt, sampling=sampling))
    return tuple(requests)


def repeated_token(vocabulary: Vocabulary, k: int) -> tuple[Request, ...]:
    """One token over and over, for each cap; without a stop, and with the stop strings that its repetitions make."""
    size, token = depth(k), vocabulary.ordinary[0]
    text = vocabulary.text((token,))
    return tuple(
        Request(
            request_id=f"s{times}-m{cap}",
            prompt_token_ids=(token,) * (k + 4),
            sampling=SamplingParams(
                max_new_tokens=cap, logit_bias=((token, 100.0),), stop=(text * times,) * (times > 0)
            ),
        )
        for times in (0, *range(2, size + 1))
        for cap in range(1, size + 1)
    )


def dead_ends(vocabulary: Vocabulary, k: int) -> tuple[Request, ...]:
    """One request for each output length over all of `depth(k)`, behind which its masks leave no token to choose."""
    size = depth(k)
    prompt, stream = _walk(vocabulary, size)
    requests = []
    for length in range(1, size + 1):
        allowed = stream[:length]
        dead = tuple((stream[length - 1], token) for token in allowed)
        sampling = SamplingParams(max_new_tokens=size + 1, allowed_token_ids=allowed, bad_words=dead)
        requests.append(Request(request_id=f"d{length}", prompt_token_ids=prompt, sampling=sampling))
    return tuple(requests)


def two_stops(vocabulary: Vocabulary, k: int) -> tuple[Request, ...]:
    """Two stops in one block, in every order: an id at p and a string that ends at q."""
    size = depth(k)
    prompt, stream = _walk(vocabulary, size)
    return tuple(
        Request(
            request_id=f"p{p}-q{q}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_new_tokens=size, stop_token_ids=(stream[p],), stop=(vocabulary.text(stream[q : q + 1]),)
            ),
        )
        for p in range(size)
        for q in range(size)
    )


def minimum_lengths(vocabulary: Vocabulary, k: int) -> tuple[Request, ...]:
    """A stop id at p and min_new_tokens n, for every p and n: the stop is banned, or it counts."""
    size = depth(k)
    prompt, stream = _walk(vocabulary, size)
    return tuple(
        Request(
            request_id=f"p{p}-n{n}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_new_tokens=size, min_new_tokens=n, stop_token_ids=(stream[p],)),
        )
        for p in range(size)
        for n in range(size + 1)
    )


def ends_of_sequence(vocabulary: Vocabulary, k: int) -> tuple[Request, ...]:
    """EOS at every output position p against every cap m: obeyed, ignored, and ignored with a stop id of the request's
    own right behind it. For a family that reaches EOS."""
    size = depth(k)
    streams = {}
    for token in vocabulary.ordinary:
        stream = vocabulary.continue_((token,), size + 1)
        if vocabulary.eos_token_id in stream[:size]:
            streams[stream.index(vocabulary.eos_token_id)] = (token, stream)
    requests = []
    for position, (token, stream) in sorted(streams.items()):
        ends: dict[str, dict[str, Any]] = {
            "obeyed": {},
            "ignored": {"ignore_eos": True},
            "stopped": {"ignore_eos": True, "stop_token_ids": (stream[position + 1],)},
        }
        for cap in range(1, size + 1):
            for name, flags in ends.items():
                sampling = SamplingParams(max_new_tokens=cap, **flags)
                requests.append(
                    Request(request_id=f"p{position}-m{cap}-{name}", prompt_token_ids=(token,), sampling=sampling)
                )
    return tuple(requests)


def caps(vocabulary: Vocabulary, k: int) -> tuple[Request, ...]:
    """Every cap up to `depth(k)` for prompts of different lengths, with a stop id somewhere."""
    size = depth(k)
    requests = []
    for i, length in enumerate((1, 2, 5, 11)):
        prompt = vocabulary.prompt(length, i)
        stop = vocabulary.continue_(prompt, size)[3 + 2 * i : 4 + 2 * i]
        for cap in range(1, size + 1):
            sampling = SamplingParams(max_new_tokens=cap, stop_token_ids=stop)
            requests.append(Request(request_id=f"q{i}-m{cap}", prompt_token_ids=prompt, sampling=sampling))
    return tuple(requests)
