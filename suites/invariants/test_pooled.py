"""ALIAS-1 on means of hidden rows: every way to pool the wrong rows is red, and most are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from harness.contract import Run
from harness.contract.request import PooledRows
from harness.invariants import Misuse, alias_1_pooled, alias_2, equal_2, judge
from suites.invariants.builders import WIDTH, assert_red, completion, good_run, request, rows
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

PROMPT_LEN = 5


def pooled_run(which: PooledRows | None) -> Run:
    """The two requests of the builders, b with the right mean of its rows."""
    asked = request("a", (1, 2, 3)), replace(request("b", (4, 5, 6, 7, 8), max_new_tokens=6), pooled_hidden=which)
    run = good_run(asked)
    own = rows_of(run, "b")
    right = {"prompt": own[:PROMPT_LEN], "output": own[PROMPT_LEN:-1], "both": own[:-1]}
    return completion("b", pooled_hidden=right[which].mean(0) if which else None)(run)


def rows_of(run: Run, request_id: str) -> torch.Tensor:
    """Rows of all tokens, the last one included."""
    done = run.of(request_id)
    return rows((*done.prompt_token_ids, *done.token_ids)).double()


Wrong = Callable[[Run, torch.Tensor], torch.Tensor]
FAULTS: list[tuple[str, PooledRows, Wrong, str]] = [
    ("prompt instead of output", "output", lambda _, own: own[:5].mean(0), "the mean of its prompt rows"),
    ("output instead of both", "both", lambda _, own: own[5:-1].mean(0), "the mean of its output rows"),
    ("everything instead of prompt", "prompt", lambda _, own: own[:-1].mean(0), "the mean of all its rows"),
    ("last token pooled", "both", lambda _, own: own.mean(0), "which was no input"),
    ("last token pooled, output", "output", lambda _, own: own[5:].mean(0), "and that of the last token"),
    ("not divided", "both", lambda _, own: own[:-1].sum(0), "the mean of all its rows, times their number"),
    ("last row only", "both", lambda _, own: own[-2], "its last row alone"),
    ("neighbour", "both", lambda run, _: rows_of(run, "a")[:-1].mean(0), "the mean of all rows of request 'a'"),
    ("prompt counted twice", "prompt", lambda _, own: torch.cat([own[:2], own[:5]]).mean(0), "no mean that is known"),
    ("a chunk left out", "prompt", lambda _, own: own[2:5].mean(0), "no mean that is known"),
    ("divided by one row more", "output", lambda _, own: own[5:-1].sum(0) / 6, "no mean that is known"),
    ("a rejected row", "output", lambda _, own: torch.cat([own[5:-1], own[:1]]).mean(0), "no mean that is known"),
    ("NaN", "both", lambda _, own: own[0] * torch.nan, "NaN: unwritten or freed memory"),
]


@pytest.mark.parametrize("which", ["prompt", "output", "both"])
def test_right_means_are_green(which: PooledRows) -> None:
    run = pooled_run(which)
    assert alias_1_pooled(run, rows) == []
    assert judge(run) == []


@pytest.mark.parametrize(("which", "wrong", "origin"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_wrong_means_are_red(which: PooledRows, wrong: Wrong, origin: str) -> None:
    run = pooled_run(which)
    spoilt = completion("b", pooled_hidden=wrong(run, rows_of(run, "b")))(run)
    found = alias_1_pooled(spoilt, rows)
    assert_red(found, "ALIAS-1", f"is not the mean of its {which} rows", request_id="b")
    assert origin in (found[0].origin or "")


def test_missing_unasked_and_misshapen_means_are_red() -> None:
    run = pooled_run("both")
    assert_red(alias_1_pooled(completion("b", pooled_hidden=None)(run), rows), "ALIAS-1", "missing", request_id="b")
    narrow = completion("b", pooled_hidden=torch.zeros(3))(run)
    assert_red(alias_1_pooled(narrow, rows), "ALIAS-1", "expected width", got=(3,))
    foreign = completion("a", pooled_hidden=torch.zeros(WIDTH))(run)
    assert_red(alias_1_pooled(foreign, rows), "ALIAS-1", "of no rows", request_id="a")
    block = completion("b", pooled_hidden=torch.zeros(2, WIDTH))(run)
    assert_red(alias_1_pooled(block, rows), "ALIAS-1", "not of the right type", request_id="b")


def test_an_output_of_one_token_has_no_mean() -> None:
    asked = replace(request("b", (4, 5, 6, 7, 8), max_new_tokens=1), pooled_hidden="output")
    run = good_run((asked,), {"b": []})
    assert alias_1_pooled(run, rows) == []
    made_up = completion("b", pooled_hidden=torch.zeros(WIDTH))(run)
    assert_red(alias_1_pooled(made_up, rows), "ALIAS-1", "of no rows", request_id="b")


def test_a_truth_of_the_wrong_length_is_misuse() -> None:
    with pytest.raises(Misuse, match=r"must be \[11, width\]"):
        alias_1_pooled(pooled_run("both"), lambda tokens: rows(tokens)[:3])


def test_means_are_compared_between_runs() -> None:
    run = pooled_run("both")
    other = completion("b", pooled_hidden=lambda d: d.pooled_hidden + 1.0)(run)
    assert equal_2(run, run) == []
    assert_red(equal_2(run, other), "EQUAL-2", "pooled hidden row differs", request_id="b")


def test_a_mean_in_another_results_memory_is_red() -> None:
    run = pooled_run("both")
    assert alias_2(run) == []
    view = completion("b", pooled_hidden=torch.zeros(2, WIDTH)[0])(run)
    assert_red(alias_2(view), "ALIAS-2", "view of a larger storage", request_id="b")
    shared = completion("a", pooled_hidden=run.of("b").pooled_hidden)(run)
    assert_red(alias_2(shared), "ALIAS-2", "shared between different requests' results")
