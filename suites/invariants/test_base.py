"""Violations read well, the registry is whole, and nonsense fails a check without stopping the harness."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.contract import HiddenStates, Run
from harness.invariants import (
    INVARIANTS,
    InvariantError,
    Violation,
    applicable,
    check,
    count_1,
    invariant,
    judge,
    offers,
    sched_1,
    state_2,
)
from suites.registration import suite

from .builders import completion, good_run, step

suite(seconds=0.2, stage="cpu", needs="cpu")

CATALOGUE = {
    *("COUNT-1", "COUNT-2", "SHAPE-1", "SHAPE-2", "ALIAS-1", "ALIAS-2", "FINISH-1", "FINISH-2", "EQUAL-1", "EQUAL-2"),
    *("LOGP-1", "ACCEPT-1", "ACCEPT-2", "STATE-1", "STATE-2", "KV-1", "SCHED-1", "SCHED-2", "SCHED-3"),
}


def test_every_invariant_of_the_catalogue_is_registered_with_a_statement() -> None:
    assert set(INVARIANTS) >= CATALOGUE
    assert all(known.statement and known.checks and known.needs for known in INVARIANTS.values())


def test_a_violation_reads_as_who_where_expected_got_origin() -> None:
    violation = Violation(
        invariant="ALIAS-1",
        message="hidden row is not that of its request",
        request_id="a",
        index=1,
        step=3,
        position=9,
        row=2,
        expected="token 4",
        got="token 7",
        origin="this is row 7 of request 'b'",
    )
    assert violation.render().splitlines() == [
        "ALIAS-1: hidden row is not that of its request",
        "  where:    request 'a' sample 1, step 3, position 9, row 2",
        "  expected: 'token 4'",
        "  got:      'token 7'",
        "  origin:   this is row 7 of request 'b'",
    ]


def test_check_raises_with_the_first_violations_the_total_and_the_reproducer() -> None:
    violations = [Violation(invariant="KV-1", message=f"page {page} leaked", step=page) for page in range(9)]
    with pytest.raises(InvariantError) as caught:
        check(violations, reproducer="draftproof run --seed 7")
    text = str(caught.value)
    assert caught.value.violations == tuple(violations)
    assert "9 violations of KV-1" in text
    assert "page 4 leaked" in text
    assert "page 5 leaked" not in text
    assert "and 4 more" in text
    assert text.endswith("reproduce: draftproof run --seed 7")
    check([])


def test_a_good_run_is_green_under_every_single_run_check() -> None:
    run = good_run()
    names = {(known.id, check_.name) for known, check_ in applicable(run)}
    assert {"COUNT-1", "COUNT-2", "SHAPE-1", "SHAPE-2", "ALIAS-2", "FINISH-1", "FINISH-2", "STATE-2", "KV-1"} == {
        invariant_id for invariant_id, _ in names
    }
    assert judge(run) == []


def test_a_black_box_offers_only_completions_and_a_check_that_needs_more_says_so() -> None:
    black = replace(good_run(), steps=(), counters=None)
    assert offers(black) == {"completion", "hidden", "logprobs", "accept_lens"}
    [violation] = state_2(black)
    assert "does not offer 'aux'" in violation.message
    assert judge(black) == []


def test_the_first_check_of_an_invariant_must_bring_its_statement() -> None:
    with pytest.raises(ValueError, match="must give its statement"):
        invariant("NEW-1", needs={"completion"})(list)


NONSENSE: list[tuple[str, Any]] = [
    ("token_ids", None),
    ("token_ids", (1.5, 2.5)),
    ("token_ids", torch.tensor([1, 2])),
    ("token_ids", (True, False)),
    ("usage", None),
    ("finish_reason", "eos"),
    ("finish_reason", None),
    ("text", 7),
    ("logprobs", ("row",)),
    ("prompt_logprobs", 3),
    ("hidden_states", torch.zeros(3)),
    ("hidden_states", HiddenStates(torch.zeros(3), ())),
    ("hidden_states", HiddenStates(torch.zeros(3, 4), (torch.zeros(5),))),
    ("accept_lens", ("3",)),
    ("draft_lens", 1.0),
]


@pytest.mark.parametrize(("field", "value"), NONSENSE)
def test_nonsense_in_a_completion_is_a_violation_of_every_check_that_reads_it(field: str, value: Any) -> None:
    run = completion("b", **{field: value})(good_run())
    for known, check_ in applicable(run):
        reads_completions = known.id not in {"SHAPE-1", "STATE-2"}
        found = check_.function(run)
        assert bool(found) or not reads_completions, check_.name
        assert all(violation.invariant == known.id for violation in found)
    assert any(f"completion.{field}" in violation.message and violation.request_id == "b" for violation in count_1(run))
    for violation in count_1(run):
        assert re.search(r"^  where: ", violation.render(), re.MULTILINE)


def test_things_that_are_no_completions_or_deltas_are_violations() -> None:
    thing: Any = {"token_ids": (1, 2)}
    number: Any = 3
    [violation] = count_1(replace(good_run(), completions=(*good_run().completions, thing)))
    assert "not a completion" in violation.message
    for nonsense in (thing, replace(good_run().steps[1].deltas[0], decode_hidden=(number,))):
        found = count_1(step(1, deltas=lambda s: (nonsense, *s.deltas[1:]))(good_run()))  # noqa: B023
        assert [v.step for v in found if "not a Delta" in v.message] == [1]


def _without(run: Run) -> Run:
    return replace(run, completions=run.completions[:1])


def _twice(run: Run) -> Run:
    return replace(run, completions=run.completions + run.completions[1:])


def _foreign(run: Run) -> Run:
    return replace(run, completions=(*run.completions, replace(run.completions[1], request_id="z")))


@pytest.mark.parametrize(
    ("corrupt", "says", "who"),
    [(_without, "no completion", "b"), (_twice, "answered twice", "b"), (_foreign, "nobody asked for", "z")],
)
def test_missing_doubled_and_foreign_answers_are_named(corrupt: Any, says: str, who: str) -> None:
    for violations in (count_1(corrupt(good_run())), sched_1(corrupt(good_run()), good_run())):
        assert [(v.request_id, says in v.message) for v in violations] == [(who, True)]


def test_an_unforeseen_crash_inside_a_check_is_a_violation_that_names_the_error() -> None:
    nothing: Any = None
    [violation] = count_1(replace(good_run(), steps=(nothing,)))
    assert "could not be judged" in violation.message
    assert "AttributeError" in violation.message
