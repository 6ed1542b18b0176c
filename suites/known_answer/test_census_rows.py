"""Census rows name what they saw: read back exactly, and changed by every kind of wrong KV."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from harness.known_answer import dense
from harness.known_answer.census import BAND, HEAD_DIM, LAG, ROPE_THETA
from suites.known_answer.support import DTYPES
from suites.registration import suite

suite(seconds=0.6, stage="cpu", needs="cpu")


def readings(target, rows):
    return [target.decode_row(row, place) for place, row in enumerate(rows)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_decode_exactly_at_300_tokens(families, dtype):
    target = families("census", dtype).target
    tokens = target.prompt(4, seed=7, owner=3)
    tokens += target.greedy(tokens, 296)
    rows = dense.target_states(target.config, target.weights, tokens, DTYPES[dtype]).hidden
    counts: Counter[int] = Counter()
    for place, reading in enumerate(readings(target, rows)):
        counts[tokens[place]] += 1
        assert (reading.token, reading.owner) == (tokens[place], 3)
        assert reading.counts == counts
        assert reading.lagged == tokens[max(0, place - LAG)]
        assert reading.error < (1e-4 if dtype == "float32" else 0.3)


def test_a_foreign_or_missing_entry_is_named(families):
    target = families("census", "float32").target
    tokens = target.prompt(60, seed=1, owner=0)
    stranger = target.alphabets.members[2][0]
    rows = dense.target_states(target.config, target.weights, (*tokens[:20], stranger, *tokens[21:])).hidden
    reading = target.decode_row(rows[-1], 59)
    assert reading.counts[stranger] == 1
    assert reading.counts[tokens[20]] == Counter(tokens)[tokens[20]] - 1
    shorter = dense.target_states(target.config, target.weights, tokens[1:]).hidden
    assert target.decode_row(shorter[-1], 59).error > 0.05


def test_a_wrong_position_copies_the_wrong_token(families, monkeypatch):
    target = families("census", "float32").target
    tokens = target.prompt(40, seed=4, owner=1)
    true_rotate = dense.rotate
    # The last query and its key sit one position too far.
    monkeypatch.setattr(
        dense, "rotate", lambda heads, theta: true_rotate(torch.cat([heads, heads[-1:]]), theta)[_late(len(heads))]
    )
    rows = dense.target_states(target.config, target.weights, tokens).hidden
    assert target.decode_row(rows[-1], 39).lagged == tokens[39 - LAG + 1]
    assert target.decode_row(rows[-2], 38).lagged == tokens[38 - LAG]


def _late(rows: int) -> list[int]:
    return [*range(rows - 1), rows]


def test_markov_rows_name_their_token(families):
    for dtype in DTYPES:
        target = families("walk", dtype).target
        rows = dense.target_states(target.config, target.weights, range(64), DTYPES[dtype]).hidden
        for token, row in enumerate(rows):
            reading = target.decode_row(row, token)
            assert reading.token == token
            assert reading.error < 1e-9


def test_lag_score_has_one_peak_and_falls_towards_it():
    """At distance LAG + x the score is that of offset x: it peaks at 0, and among few tokens prefers the first."""
    half = HEAD_DIM // 2
    frequency = ROPE_THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    frequency = frequency[(frequency >= BAND[0]) & (frequency <= BAND[1])]
    score = (torch.arange(2048, dtype=torch.float64)[:, None] * frequency).cos().mean(-1)
    assert len(frequency) == 5
    assert score[1:].max() < 0.93
    falls = -score[: LAG + 1].diff()
    assert falls.min() > 0.07
