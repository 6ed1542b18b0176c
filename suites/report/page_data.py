"""Files for the page, made by what makes them in earnest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.contract import Completion, HiddenStates, Request, Run, SamplingParams
from harness.mutants import zoo
from harness.mutants.runs import Kill, Trial, Verdict
from harness.record import write
from harness.report.scorecard import Outcome, Scorecard, Status
from harness.report.zoo import as_json
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES

VIOLATION = """1 violation of ALIAS-1
ALIAS-1: hidden row is not that of its request and position
  where:    request 'r1', position 9, row 9
  expected: 'token 18 of alphabet 1'
  got:      'token 33 of alphabet 0'"""
REPRODUCER = "pytest 'suites/conformance/test_alias.py::test_rows[EAGLE]' --hypothesis-seed=7"


def outcome(status: Status, drafter: str, invariant: str, engine: str = "reference", **fields: Any) -> Outcome:
    """A red one has the words of a violation and ends with its reproducer, as the checks write it."""
    red = status in ("fail", "error")
    usual = {
        "nodeid": f"suites/conformance/test_alias.py::test_rows[{drafter}]",
        "examples": int(status == "pass"),
        "seconds": 0.5,
        "message": f"{VIOLATION}\nreproduce: {REPRODUCER}" if red else f"{status}: why" if status == "refused" else "",
        "reproduce": REPRODUCER if red else "",
    }
    return Outcome(engine=engine, drafter=drafter, invariants=(invariant,), status=status, **{**usual, **fields})


def scorecard(path: Path, *outcomes: Outcome, version: str = "") -> Path:
    made = Scorecard()
    for one in outcomes:
        made.add(one)
        made.versions[one.engine] = version
    made.write(path)
    return path


def record(folder: Path, lane: str, name: str = "census", *, neighbours: bool = False) -> Path:
    """A run of the reference engine, four requests that watch their hidden rows; with `neighbours` the second gets
    output rows of the first, as if rows were read at the wrong stride."""
    known = vocabulary(name)
    requests = tuple(
        Request(
            request_id=f"r{i}",
            prompt_token_ids=known.prompt(length, i),
            sampling=SamplingParams(max_new_tokens=cap),
            return_hidden_states=True,
        )
        for i, (length, cap) in enumerate(((3, 14), (9, 12), (5, 13), (2, 15)))
    )
    run = Lane("reference", LANES[lane], folder.parent / "known").run(requests, family=name)
    return write(swapped(run) if neighbours else run, folder)


def swapped(run: Run) -> Run:
    first, second, *others = run.completions
    assert first.hidden_states is not None
    assert second.hidden_states is not None
    stolen = (*first.hidden_states.decode[:4], *second.hidden_states.decode[4:])
    return replace(
        run, completions=(first, _with_rows(second, HiddenStates(second.hidden_states.prefill, stolen)), *others)
    )


def _with_rows(done: Completion, rows: HiddenStates) -> Completion:
    return replace(done, hidden_states=rows)


def kill_matrix(path: Path) -> Path:
    """The verdicts on three mutants of the zoo: killed, killed by the wrong invariant as well, and survived."""
    first, second, third = list(zoo().values())[:3]

    def trial(name: str, *seen: str) -> Trial:
        kills = tuple(
            Kill(invariant=one, seconds=1.5, test="suites/x.py::test_x", message="it is wrong") for one in seen
        )
        return Trial(mutant=name, lanes=("EAGLE",), kills=kills, num_tests=3, seconds=2.0, smoke="right")

    verdicts = [
        Verdict(mutant=first, trial=trial(first.id, *first.red)),
        Verdict(mutant=second, trial=trial(second.id, *second.red, "CONF-2")),
        Verdict(mutant=third, trial=trial(third.id)),
    ]
    path.write_text(json.dumps(as_json(verdicts, [trial("none")])), encoding="utf-8")
    return path


def baselines(path: Path, *values: float, **figures: float) -> Path:
    """One figure, a commit a day; the newest comes first."""
    entries = [
        {
            "runner class": "cpu-2",
            "commit": f"c{day}",
            "date": f"2026-11-{day + 1:02}",
            "counted": {"target forwards per token": value, **figures},
            "timed": {"EAGLE speed-up": 1.5},
        }
        for day, value in enumerate(values)
    ]
    path.write_text(json.dumps(entries[::-1]), encoding="utf-8")
    return path
