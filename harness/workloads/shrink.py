"""Fewest requests, shortest prompts, fewest tokens, fewest flags: the smallest batch on which something still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from harness.contract import Request, SamplingParams

Fails = Callable[[tuple[Request, ...]], bool]


def shrink(requests: tuple[Request, ...], fails: Fails, seconds: float) -> tuple[Request, ...]:
    """The smallest batch that was found within the time, starting from one on which `fails` holds. A batch counts as
    smaller by its requests first, then by tokens, then by flags. `fails` may be flaky: what it once said is believed.
    """
    until = time.monotonic() + seconds
    best, progress = requests, True
    while progress:
        progress = False
        for candidate in _smaller(best):
            if time.monotonic() > until:
                return best
            if fails(candidate):
                best, progress = candidate, True
                break
    return best


def _smaller(requests: tuple[Request, ...]) -> Iterator[tuple[Request, ...]]:
    """Simplifications, the boldest first; each is smaller, so that shrinking ends."""
    half = len(requests) // 2
    if half:
        yield requests[:half]
        yield requests[half:]
    if len(requests) > 2:
        for left_out in range(len(requests)):
            yield requests[:left_out] + requests[left_out + 1 :]
    for index, request in enumerate(requests):
        for simpler in _simpler(request):
            yield (*requests[:index], simpler, *requests[index + 1 :])


def _simpler(request: Request) -> Iterator[Request]:
    sampling, prompt = request.sampling, request.prompt_token_ids
    if request.arrival_step:
        yield replace(request, arrival_step=0)
    if request.abort_step is not None:
        yield replace(request, abort_step=None)
    for length in sorted({1, sampling.max_new_tokens // 2, sampling.max_new_tokens - 1} - {0}):
        if length < sampling.max_new_tokens:
            least = min(sampling.min_new_tokens, length)
            yield replace(request, sampling=replace(sampling, max_new_tokens=length, min_new_tokens=least))
    for kept in sorted({1, len(prompt) // 2, len(prompt) - 1} - {0}):
        if kept < len(prompt):
            yield replace(request, prompt_token_ids=prompt[-kept:])
    for name, usual in _USUAL.items():
        if getattr(sampling, name) != usual:
            yield replace(request, sampling=replace(sampling, **{name: usual}))
    if request.pooled_hidden is not None:
        yield replace(request, pooled_hidden=None)
    if request.num_speculative_tokens is not None:
        yield replace(request, num_speculative_tokens=None)
    if request.return_hidden_states:
        yield replace(request, return_hidden_states=False)


_USUAL = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}
del _USUAL["max_new_tokens"]
