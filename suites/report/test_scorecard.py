"""The scorecard: status of a cell, empty cells, the file and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.report.scorecard import NO_TEST_RAN, Outcome, Scorecard, Status
from harness.report.table import render
from harness.workloads.lanes import LANES, catalogue
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")


def outcome(
    status: Status, drafter: str = "EAGLE", invariants: tuple[str, ...] = ("COUNT-1",), examples: int = 1
) -> Outcome:
    return Outcome(
        engine="reference",
        drafter=drafter,
        invariants=invariants,
        status=status,
        nodeid="suites/x.py::test_x",
        examples=examples,
        seconds=0.5,
        message=f"it is {status}\nand more",
    )


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        (("pass", "pass"), "pass"),
        (("pass", "refused"), "pass"),
        (("refused", "refused"), "refused"),
        (("pass", "fail", "refused"), "fail"),
        (("fail", "error", "pass"), "error"),
    ],
)
def test_a_cell_is_as_good_as_its_worst_test(statuses: tuple[Status, ...], status: Status) -> None:
    scorecard = Scorecard()
    for each in statuses:
        scorecard.add(outcome(each, examples=3))
    (cell,) = scorecard.cells.values()
    assert cell.status == status
    assert (cell.examples, cell.seconds) == (3 * len(statuses), 0.5 * len(statuses))
    assert scorecard.ok == (status in ("pass", "refused"))


def test_an_empty_cell_is_an_error() -> None:
    scorecard = Scorecard()
    scorecard.expect("reference", "EAGLE", ["COUNT-1", "COUNT-2"])
    scorecard.add(outcome("pass"))
    (empty,) = scorecard.empty
    assert (empty.invariant, empty.status, empty.message) == ("COUNT-2", "error", NO_TEST_RAN)
    assert not scorecard.ok


def test_a_test_of_two_invariants_counts_for_both() -> None:
    scorecard = Scorecard()
    scorecard.add(outcome("fail", invariants=("KV-1", "SCHED-2")))
    assert {cell.invariant for cell in scorecard.cells.values()} == {"KV-1", "SCHED-2"}


def test_the_file_is_a_list_of_cells(tmp_path: Path) -> None:
    scorecard = Scorecard()
    scorecard.add(outcome("fail"))
    scorecard.add(outcome("refused", drafter="MTP"))
    scorecard.write(tmp_path / "build" / "scorecard.json")
    first, second = json.loads((tmp_path / "build" / "scorecard.json").read_text(encoding="utf-8"))
    assert (first["engine"], first["drafter"], first["invariant"]) == ("reference", "EAGLE", "COUNT-1")
    assert (first["status"], first["tests"], first["examples"], first["seconds"]) == ("fail", 1, 1, 0.5)
    assert first["failures"][0]["nodeid"] == "suites/x.py::test_x"
    assert (second["status"], second["refused"]) == ("refused", 1)


def test_the_table_fits_a_terminal() -> None:
    scorecard = Scorecard()
    for drafter, spec in LANES.items():
        scorecard.expect("reference", drafter, [name for name in catalogue() if spec.applies(name)])
    for drafter in LANES:
        scorecard.add(outcome("pass", drafter=drafter, examples=12345))
    scorecard.add(outcome("fail", drafter="EAGLE-tree", invariants=("ACCEPT-1",)))
    text = render(scorecard, colour=False)
    assert max(map(len, text.splitlines())) <= 80
    assert all(f" {drafter} " in f" {text} ".replace("\n", " ") for drafter in LANES), "a name is broken"
    assert "\x1b" not in text
    assert "12345" in text
    assert "FAIL" in text
    assert "\x1b" in render(scorecard, colour=True)


def test_an_outcome_survives_the_way_from_a_worker() -> None:
    sent = outcome("fail", invariants=("KV-1", "SCHED-2"))
    assert Outcome.from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_cells_that_were_not_asked_for_are_left_out_unless_they_are_red() -> None:
    """A test goes into every cell that it asks for: the others would be filled in part, and look like the whole."""
    scorecard = Scorecard()
    for status, invariants in (("pass", ("COUNT-1", "KV-1")), ("fail", ("LAW-1",)), ("refused", ("GRAM-1", "COUNT-1"))):
        scorecard.add(outcome(status, invariants=invariants))
    scorecard.narrow(["COUNT-1"])
    assert {cell.invariant: cell.status for cell in scorecard.cells.values()} == {"COUNT-1": "pass", "LAW-1": "fail"}
    scorecard.narrow([])
    assert len(scorecard.cells) == 2
