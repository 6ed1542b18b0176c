"""SGLang #26163 (mended by PR #28496): hidden states of decode steps under spec V2.

Verify yields one strided tensor [bs * num_draft_tokens, hidden], a window of rows for each request. The code that
appends rows to a request read it as if it were [bs, hidden], as it is without speculation: row i for request i, one
row for a whole block of accepted tokens. With more than one request the row was a neighbour's, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.invariants import count_1, judge
from harness.workloads.lane import Lane
from reference_engine.batch import StepResult
from reference_engine.output import OutputProcessor
from reference_engine.request import RequestOutput, RequestState
from suites.registration import suite
from suites.regressions.support import accepting, asking, errs, long_enough, misattributed, observe, owners

suite(seconds=2, stage="cpu", needs="cpu")

CAPS = (8, 6, 9, 7)
Rows = Callable[[StepResult, int, list[int]], list[int]]
"""(result, place of the request in the batch, accepted path cut to the tokens) -> rows of the strided output."""


def row_of_the_batch(_result: StepResult, index: int, _path: list[int]) -> list[int]:
    """One row per verify step, as if there were no windows."""
    return [index]


def windows_without_stride(_result: StepResult, index: int, path: list[int]) -> list[int]:
    """As many rows as tokens, but each window starts where it would if windows were one row wide."""
    return [index + node for node in path]


def plant(monkeypatch: pytest.MonkeyPatch, rows_of: Rows) -> None:
    original = OutputProcessor._output

    def output(
        self: OutputProcessor,
        result: StepResult,
        index: int,
        request: RequestState,
        tokens: list[int],
        path: list[int] | None,
        first: bool,
    ) -> RequestOutput:
        right = original(self, result, index, request, tokens, path, first)
        if path is None or not request.return_hidden_states:
            return right
        rows = rows_of(result, index, path[: len(tokens)])
        return replace(right, decode_hidden=tuple(result.hidden[row].clone() for row in rows))

    monkeypatch.setattr(OutputProcessor, "_output", output)


def test_without_the_bug(drafter: Lane) -> None:
    run = observe(drafter, asking(drafter, long_enough(drafter, CAPS)), overlap=True, batch_buckets=(8,))
    assert judge(run) + misattributed(drafter, run) == []
    assert len({done.accept_lens for done in run.completions}) > 1, "accept lengths are not ragged"


def test_one_row_per_verify_step(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few rows (COUNT-1), and the rows are those of the first requests of the batch (ALIAS-1)."""
    requests = asking(drafter, long_enough(drafter, CAPS))
    plant(monkeypatch, row_of_the_batch)
    run = observe(drafter, requests, overlap=True)
    assert owners(count_1(run)) == accepting(run) == {"r0", "r1", "r2", "r3"}
    wrong = misattributed(drafter, run)
    assert owners(wrong) == {"r0", "r1", "r2", "r3"}
    foreign = [violation for violation in wrong if "of request 'r0'" in (violation.origin or "")]
    # Row i of its window is a row of r0 where i drafts of r0 were right.
    assert {"r1", "r2"} | (set() if errs(drafter) else {"r3"}) <= owners(foreign)
    assert all("of alphabet 0" in (violation.origin or "") for violation in foreign)


def test_one_row_per_verify_step_for_a_request_alone(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a neighbour the one row is right, and only the number tells."""
    requests = asking(drafter, long_enough(drafter, CAPS[:1]))
    plant(monkeypatch, row_of_the_batch)
    run = observe(drafter, requests, overlap=True)
    (violation, *_) = count_1(run)
    steps = len(run.of("r0").accept_lens or ())
    assert (violation.expected, violation.got) == (requests[0].sampling.max_new_tokens - 1, steps)


def test_right_number_of_rows_with_the_wrong_stride(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything adds up; only the rows' own values say that they are somebody else's."""
    requests = asking(drafter, long_enough(drafter, CAPS))
    plant(monkeypatch, windows_without_stride)
    run = observe(drafter, requests, overlap=True)
    assert judge(run) == []
    wrong = misattributed(drafter, run)
    assert owners(wrong) == {"r1", "r2", "r3"}
    assert any("of request 'r0'" in (violation.origin or "") for violation in wrong)


def test_the_wrong_stride_is_right_for_a_request_alone(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a test with one request at a time did not see it."""
    plant(monkeypatch, windows_without_stride)
    run = observe(drafter, asking(drafter, long_enough(drafter, CAPS[:1])), overlap=True)
    assert judge(run) + misattributed(drafter, run) == []
