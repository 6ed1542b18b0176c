"""Whatever an engine hands over, a check returns violations: it never raises, and the others still run."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import harness.invariants
import harness.oracles
from harness.contract import Completion, Delta, PageLedger, ProposeTrace, Run, StateSnapshot, StepTrace, VerifyTrace
from harness.invariants import (
    Scribbler,
    Violation,
    accept_1,
    accept_2,
    accept_2_drift,
    alias_1,
    alias_2_scribbled,
    equal_1,
    equal_2,
    finish_1,
    finish_2,
    judge,
    logp_1,
    sched_1,
    sched_2,
    sched_3,
    state_1,
)
from suites.registration import suite

from .builders import ACCEPTS, Corruption, completion, delta, fresh, good_run, law, rows, snapshot, step

suite(seconds=0.5, stage="cpu", needs="cpu")

GARBAGE: list[Any] = [
    None,
    -1,
    10**9,
    float("nan"),
    "junk",
    b"junk",
    (),
    [],
    (None,),
    ("a", 1),
    ((1, 2), (3,)),
    (1.5, float("nan")),
    (10**12, 10**12),
    {"a": 1},
    torch.tensor(float("nan")),
    torch.zeros(0),
    torch.zeros(2, 3),
    torch.zeros(2, 0, 5, dtype=torch.int64),
    (torch.zeros(1), None),
    object,
]

PLACES: list[tuple[type, str]] = [
    (kind, field.name)
    for kind in (Completion, Delta, StepTrace, ProposeTrace, VerifyTrace, PageLedger, StateSnapshot)
    for field in fields(kind)
]


def corrupted(kind: type, field: str, value: Any) -> Corruption:
    """The good run with one field of one record of b (or of step 1) replaced."""
    change = {field: value}
    parts = {ProposeTrace: "propose", VerifyTrace: "verify", PageLedger: "pages"}

    def apply(run: Run) -> Run:
        if kind is Completion:
            return completion("b", **{field: lambda _done: value})(run)
        if kind is Delta:
            return delta(1, "b", **{field: lambda _delta: value})(run)
        if kind is StateSnapshot:
            return snapshot(1, "b", **{field: lambda _state: value})(run)
        if kind is StepTrace:
            return replace(run, steps=(run.steps[0], replace(run.steps[1], **change), *run.steps[2:]))
        return step(1, parts[kind], **{field: lambda _part: value})(run)

    return apply


def everything(run: Run) -> list[Violation]:
    """Every check of the catalogue on this run."""
    good = good_run()
    out = judge(run) + alias_1(run, rows) + logp_1(run, law) + state_1(run, fresh)
    out += accept_1(run, ACCEPTS) + accept_2(run, full=True) + accept_2_drift([good, run])
    out += accept_2_drift([good, run], by_position=True)
    out += equal_1(run, good) + equal_2(good, run, accept_lens=True) + finish_1(run, good) + finish_2(run, good)
    out += sched_1(run, good) + sched_2(run, 4) + sched_3(run, {"a": good, "b": good})
    return out + alias_2_scribbled(good_run(), run, Scribbler())


@settings(max_examples=15, deadline=None)
@given(place=st.sampled_from(PLACES), value=st.sampled_from(GARBAGE))
def test_no_garbage_stops_a_check(place: tuple[type, str], value: Any) -> None:
    for violation in everything(corrupted(*place, value)(good_run())):
        assert isinstance(violation, Violation)
        assert violation.render()


@pytest.mark.parametrize("steps", [(), (None,), ("step", 3), None])
@pytest.mark.parametrize("completions", [(), (None,), ("done",)])
def test_no_garbage_in_place_of_records_stops_a_check(steps: Any, completions: Any) -> None:
    run = replace(good_run(), steps=steps, completions=completions)
    assert everything(run)


@pytest.mark.parametrize("package", [harness.invariants, harness.oracles])
def test_checks_import_the_contract_and_nothing_else_of_ours(package: Any) -> None:
    ours = {"harness", "reference_engine", "kernels", "suites"}
    for file in Path(package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name is not None and name.split(".")[0] in ours:
                    assert name == "harness.contract" or name.startswith(package.__name__), (file.name, name)
