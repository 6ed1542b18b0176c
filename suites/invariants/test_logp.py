"""LOGP-1: each wrong number is red at its position; ties among equal probabilities are not an order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.contract import LogprobRow
from harness.invariants import Misuse, Violation, logp_1
from suites.registration import suite

from .builders import VOCAB, Corruption, assert_red, completion, good_run, law, logprob_row

suite(seconds=0.2, stage="cpu", needs="cpu")

PROMPT, TOKENS = (4, 5, 6, 7, 8), (11, 10, 5, 12, 15, 14)


def at(row: int, field: str = "logprobs", **changes: Any) -> Corruption:
    """Change one row of b; a callable value is given the old row."""

    def change(done: Any) -> tuple[Any, ...]:
        rows = list(getattr(done, field))
        rows[row] = replace(rows[row], **{n: v(rows[row]) if callable(v) else v for n, v in changes.items()})
        return tuple(rows)

    return completion("b", **{field: change})


def shifted(done: Any) -> tuple[LogprobRow, ...]:
    """Numbers of the next row, under the right token ids."""
    rows = done.logprobs
    return tuple(replace(rows[(i + 1) % len(rows)], token_id=row.token_id) for i, row in enumerate(rows))


BROKEN: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("p = 1", at(2, logprob=0.0), "wrong logprob", {"row": 2, "position": 7, "got": 0.0}),
    ("off", at(2, logprob=lambda r: r.logprob + 3e-5), "wrong logprob", {"row": 2}),
    ("NaN", at(2, logprob=float("nan")), "wrong logprob", {"row": 2}),
    ("-inf", at(2, logprob=float("-inf")), "wrong logprob", {"row": 2}),
    ("rank", at(2, rank=2), "wrong rank", {"row": 2, "expected": 1, "got": 2}),
    ("rank 0", at(2, rank=0), "wrong rank", {"row": 2, "got": 0}),
    ("no rank", at(2, rank=None), "rank is missing", {"row": 2, "position": 7}),
    ("prompt", at(2, "prompt_logprobs", logprob=-0.1), "wrong logprob", {"row": 2, "position": 2}),
    ("token", at(2, token_id=3), "another token", {"row": 2, "expected": 5, "got": 3}),
    ("top short", at(2, top=lambda r: r.top[:1]), "has not n entries", {"row": 2, "expected": 2, "got": 1}),
    ("top long", at(2, top=lambda r: (*r.top, (0, -5.0))), "has not n entries", {"row": 2, "got": 3}),
    ("top twice", at(2, top=lambda r: r.top[:1] * 2), "twice", {"row": 2}),
    ("top stranger", at(2, top=lambda r: (r.top[0], (VOCAB, -1.6))), "outside the vocabulary", {"row": 2}),
    ("top order", at(2, top=lambda r: r.top[::-1]), "top-n slot 0: another token", {"row": 2}),
    ("top value", at(2, top=lambda r: (r.top[0], (r.top[1][0], -1.0))), "slot 1 (token 6): wrong logprob", {"row": 2}),
    (
        "top missed one",
        at(2, top=lambda r: (r.top[0], (0, -4.94164))),
        "top-n slot 1: another token",
        {"row": 2, "got": 0},
    ),
    ("none", completion("b", logprobs=None), "not one row per token", {"expected": 6, "got": "nothing"}),
    ("short", completion("b", logprobs=lambda d: d.logprobs[:4]), "not one row per token", {"got": 4}),
    ("no prompt rows", completion("b", prompt_logprobs=None), "prompt_logprobs has not one row", {}),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_logp_1_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert logp_1(good_run(), law) == []
    assert_red(logp_1(corrupt(good_run()), law), "LOGP-1", says, request_id="b", **where)


def test_logp_1_is_green_inside_the_tolerance() -> None:
    assert logp_1(at(2, logprob=lambda r: r.logprob + 9e-6)(good_run()), law) == []


def test_ranks_that_an_engine_does_not_tell_are_not_judged() -> None:
    run = at(2, rank=None)(good_run())
    assert logp_1(replace(run, capabilities=replace(run.capabilities, tells_ranks=False)), law) == []


def test_logp_1_says_where_a_row_belongs() -> None:
    """A row of the right token at another position, as a block that is shifted by one would give."""
    run = good_run()
    run = completion("b", token_ids=(11, 11, 5, 12, 15, 14))(run)
    wrong = (logprob_row((*PROMPT, 11), 11, 2), *run.of("b").logprobs[1:])  # type: ignore[index]
    found = logp_1(completion("b", logprobs=wrong)(run), law)
    assert_red(
        found, "LOGP-1", "wrong logprob", request_id="b", row=0, origin="this row fits position 6 of the same request"
    )


def test_equal_probabilities_are_ties_and_not_an_order() -> None:
    """Fourteen tokens share the rest of the mass: any of them may be listed, and ranked 3 to 16."""
    row = logprob_row((*PROMPT, 11, 10), 5, 4)
    thirds = [token_id for token_id in range(VOCAB) if law((10,))[token_id] == law((10,)).min()]
    run = good_run()
    asked = tuple(replace(r, sampling=replace(r.sampling, logprobs=4)) for r in run.requests)
    rows = [logprob_row((*PROMPT, *TOKENS[:i]), TOKENS[i], 4) for i in range(6)]
    for pair in (thirds[:2], thirds[-2:], thirds[4:2:-1]):
        rows[2] = replace(row, top=(*row.top[:2], *((token_id, row.top[2][1]) for token_id in pair)))
        fine = replace(completion("b", logprobs=tuple(rows))(run), requests=asked)
        assert [violation for violation in logp_1(fine, law) if violation.request_id == "b"] == []


@pytest.mark.parametrize("rank", [3, 9, 16])
def test_a_tied_token_may_take_any_rank_of_its_tie(rank: int) -> None:
    rare = logprob_row((*PROMPT, 11, 10), 0, 2)
    run = completion("b", token_ids=(11, 10, 0, 12, 15, 14))(good_run())
    rows = [logprob_row((*PROMPT, 11, 10, 0, 12, 15, 14)[: 5 + i], (11, 10, 0, 12, 15, 14)[i], 2) for i in range(6)]
    rows[2] = replace(rare, rank=rank)
    assert logp_1(completion("b", logprobs=tuple(rows))(run), law) == []
    rows[2] = replace(rare, rank=2)
    found = logp_1(completion("b", logprobs=tuple(rows))(run), law)
    assert_red(found, "LOGP-1", "wrong rank", request_id="b", row=2, expected="3..16 (tied)")


def test_impossible_is_impossible_in_every_spelling() -> None:
    def hard(prefix: tuple[int, ...]) -> torch.Tensor:
        scores = law(prefix)
        return torch.where(scores == scores.min(), torch.tensor(-torch.inf, dtype=torch.float64), scores)

    def spelt(value: float) -> Corruption:
        return at(1, "prompt_logprobs", logprob=value)

    for value in (float("-inf"), -3.4e38, -1e4):
        found = logp_1(spelt(value)(good_run()), hard)
        assert not [v for v in found if (v.request_id, v.position, v.message) == ("b", 1, "wrong logprob")]
    assert_red(logp_1(spelt(-30.0)(good_run()), hard), "LOGP-1", "wrong logprob", request_id="b", row=1)


def test_logp_1_refuses_a_law_of_the_wrong_shape() -> None:
    with pytest.raises(Misuse, match="one log probability per token id"):
        logp_1(good_run(), lambda prefix: law(prefix).unsqueeze(0))


GAINED = 0.7
"""Nats that a mask gives to all that it leaves."""


def behind_a_mask(corrupt: Corruption = lambda run: run, *, declared: bool = True) -> list[Violation]:
    """A run that was good until b had a grammar, whose mask comes before the logprobs."""
    run = completion("b", logprobs=lambda done: tuple(map(likelier, done.logprobs)))(good_run())
    requests = tuple(
        replace(one, sampling=replace(one.sampling, regex=".*")) if one.request_id == "b" else one
        for one in run.requests
    )
    capabilities = replace(run.capabilities, grammar_before_logprobs=declared)
    return logp_1(corrupt(replace(run, requests=requests, capabilities=capabilities)), law)


def likelier(row: LogprobRow) -> LogprobRow:
    return replace(
        row, logprob=row.logprob + GAINED, rank=1, top=tuple((token, value + GAINED) for token, value in row.top)
    )


def test_a_mask_in_front_of_the_logprobs_leaves_the_odds() -> None:
    assert behind_a_mask() == []
    assert behind_a_mask(declared=False)
    assert behind_a_mask(at(2, top=lambda row: (row.top[0], (row.top[1][0], float("-inf"))))) == []


@pytest.mark.parametrize(
    ("corrupt", "says"),
    [
        (at(2, logprob=lambda row: row.logprob - 2 * GAINED), "less likely"),
        (at(2, top=lambda row: (row.top[0], (row.top[1][0], row.top[1][1] - 0.1))), "changed the odds"),
        (at(2, token_id=3), "another token"),
        (at(2, "prompt_logprobs", logprob=-0.1), "wrong logprob"),
    ],
    ids=["less", "odds", "token", "prompt"],
)
def test_but_changes_nothing_else(corrupt: Corruption, says: str) -> None:
    assert_red(behind_a_mask(corrupt), "LOGP-1", says, request_id="b", row=2)
