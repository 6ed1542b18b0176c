"""NGRAM: drafts are looked up in the committed tokens, so the closed form needs no weights."""

from __future__ import annotations

from collections.abc import Sequence

from harness.known_answer.base import Drafter, Target

PROMPT_LOOKUP_MIN, PROMPT_LOOKUP_MAX = 1, 3
"""Window of the known-answer drafter: so small that repeats are found soon, and wide enough for a choice."""


def look_up(tokens: Sequence[int], k: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Up to k tokens that followed the first earlier occurrence of the longest n-gram that ends `tokens`, n in
    shortest..longest; nothing where none occurs before."""
    tokens = tuple(tokens)
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return ()


class NgramDrafter(Drafter):
    """Prompt lookup for any target. It has no checkpoint: config and weights are empty and nothing is written."""

    method = "NGRAM"

    def __init__(self, target: Target, shortest: int = PROMPT_LOOKUP_MIN, longest: int = PROMPT_LOOKUP_MAX) -> None:
        self.target, self.shortest, self.longest = target, shortest, longest
        self.config, self.weights = {}, {}

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        """As many as were found, which may be fewer than k or none."""
        return look_up(tokens, k, self.shortest, self.longest)
