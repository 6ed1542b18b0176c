"""Exhaustive sweeps over the sizes at which engines break: many combinations share one engine run.

Each function gives a batch for draft length k. Lengths and caps meet in every order, because requests differ in both.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.contract import Request, SamplingParams
from harness.workloads.strategies import Batch
from harness.workloads.vocabulary import Vocabulary

LENGTHS = (1, 2, 4, 5, 8, 16)
"""Draft lengths: small ones, powers of two and their neighbours, longer than a page, a chunk and a prompt."""


def _requests(vocabulary: Vocabulary, sizes: Iterable[tuple[int, int]]) -> tuple[Request, ...]:
    return tuple(
        Request(
            request_id=f"p{length}-m{cap}-{place}",
            prompt_token_ids=vocabulary.prompt(length, place),
            sampling=SamplingParams(max_new_tokens=cap, logprobs=0),
            return_hidden_states=True,
        )
        for place, (length, cap) in enumerate(sizes)
    )


def pages_and_chunks(vocabulary: Vocabulary, k: int) -> Batch:
    """Prompts of 1 to 4 tokens and around one and two pages and chunks; caps around one and two blocks."""
    page, chunk = 4, 7
    lengths = [1, 2, 3, 4, *(size + step for size in (page, 2 * page, chunk, 2 * chunk) for step in (-1, 0, 1))]
    blocks = [1, *(size + step for size in (k + 1, 2 * (k + 1)) for step in (-1, 0, 1))]
    sizes = [(length, blocks[place % len(blocks)]) for place, length in enumerate(dict.fromkeys(lengths))]
    changes = (("chunk_size", chunk), ("context_length", 64), ("max_running", len(sizes)), ("page_size", page))
    return Batch(_requests(vocabulary, sizes), k, changes)


def context_limit(vocabulary: Vocabulary, k: int) -> Batch:
    """Requests that end d tokens before the context does, for d in 0..k + 2, from prompts of different lengths."""
    context = 3 * (k + 1) + 5
    sizes = [(1 + missing % 5, context - missing - 1 - missing % 5) for missing in range(k + 3)]
    changes = (("context_length", context), ("max_running", len(sizes)), ("page_size", 4))
    return Batch(_requests(vocabulary, sizes), k, changes)


def between_buckets(vocabulary: Vocabulary, k: int) -> Batch:
    """Nine requests that end one after another: the batch goes through every size from the largest bucket to 1."""
    sizes = [(3 + place % 3, 2 + place * (k + 1)) for place in range(9)]
    changes = (("batch_buckets", (2, 4, 8, 12)), ("context_length", 16 + 9 * (k + 1)), ("max_running", 9))
    return Batch(_requests(vocabulary, sizes), k, changes)


def token_zero(vocabulary: Vocabulary, k: int) -> Batch:
    """Token id 0 first, last and alone in prompts, and emitted at every place of a block. For a target that walks."""
    before = {vocabulary.continue_((token,), 1)[0]: token for token in vocabulary.ordinary}
    prompts = [(0,), (0, 0), (vocabulary.ordinary[-1], 0), (0, vocabulary.ordinary[-1])]
    token = 0
    for _ in range(k + 2):
        token = before[token]
        prompts.append((token,))
    requests = tuple(
        Request(
            request_id=f"z{place}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_new_tokens=2 * (k + 1) + 1, logprobs=0),
            return_hidden_states=True,
        )
        for place, prompt in enumerate(prompts)
    )
    return Batch(requests, k, (("context_length", 64), ("max_running", len(requests))))


BOUNDARIES = {
    sweep.__name__: (sweep, family)
    for sweep, family in (
        (pages_and_chunks, "census"),
        (context_limit, "census"),
        (between_buckets, "census"),
        (token_zero, "walk"),
    )
}
"""Sweep and the family that it is for, by name."""
