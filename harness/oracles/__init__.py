"""Oracles that need no engine: the sampling law, the end of a request, and statistics with stated error rates."""

from __future__ import annotations

from harness.oracles.finish import Finish, expected_completion, finish, greedy_stream
from harness.oracles.grammar import canonical_grammar, following_ids, masked_stream
from harness.oracles.sampling import History, block_law, decision_gap, next_token_law, support
from harness.oracles.statistics import Fit, goodness_of_fit, power, sample_size, share_alpha, tally, total_variation

__all__ = [
    "Finish",
    "Fit",
    "History",
    "block_law",
    "canonical_grammar",
    "decision_gap",
    "expected_completion",
    "finish",
    "following_ids",
    "goodness_of_fit",
    "greedy_stream",
    "masked_stream",
    "next_token_law",
    "power",
    "sample_size",
    "share_alpha",
    "support",
    "tally",
    "total_variation",
]
