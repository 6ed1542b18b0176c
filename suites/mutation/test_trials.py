"""Trials: what a process with a fault in it is told to do, and what is made of what it says or fails to say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.mutants import Edit, Mutant, zoo
from harness.mutants.runs import Laboratory, Trial, Verdict
from harness.report.zoo import describe
from suites.registration import suite

suite(seconds=9.3, stage="cpu", needs="cpu")

FEW = ("suites/conformance/test_count.py::test_rows_per_token",)


def mutant(*edits: Edit, red: tuple[str, ...] = ("COUNT-1",), **fields: object) -> Mutant:
    return Mutant(
        **{
            "id": "planted",
            "fault": "",
            "bugs": (),
            "lanes": ("EAGLE",),
            "suites": FEW,
            "red": red,
            "edits": edits,
            **fields,
        }
    )  # type: ignore[arg-type]


DROPS_A_TOKEN = Edit("reference_engine.output", "token_ids=tuple(tokens),", "token_ids=tuple(tokens[1:]),")
DIES = Edit("reference_engine.output", "        outputs = []\n", "        import os\n\n        os._exit(7)\n")
HANGS = Edit("reference_engine.output", "        outputs = []\n", "        while True:\n            pass\n")


def verdict(laboratory: Laboratory, one: Mutant) -> Verdict:
    (found,) = laboratory.run([one], others=0)
    return found


def test_a_fault_is_seen_and_nothing_without_it(laboratory: Laboratory) -> None:
    found = verdict(laboratory, mutant(DROPS_A_TOKEN, smoke="wrong"))
    assert found.killed
    assert found.trial.red == ("COUNT-1",)
    assert found.faults == ()
    (trial,) = laboratory.trials({"nothing": laboratory.order(mutant(), others=0)})
    assert (trial.red, trial.smoke, trial.num_tests, trial.ended) == ((), "right", 1, "")


def test_a_process_that_dies_is_told_with_its_exit_code(laboratory: Laboratory) -> None:
    found = verdict(laboratory, mutant(DIES))
    assert "exit code 7" in found.trial.ended
    assert found.faults


@pytest.mark.full
def test_a_process_that_hangs_is_killed() -> None:
    found = verdict(Laboratory(workers=1, limit=6), mutant(HANGS))
    assert "killed after 6 s" in found.trial.ended


def test_a_survivor_and_a_wrong_kill_are_faults() -> None:
    quiet = Trial(mutant="planted", lanes=("EAGLE",), kills=(), num_tests=1, seconds=1.0, smoke="right")
    assert Verdict(mutant=mutant(), trial=quiet).faults == ("survived",)


def test_list_and_show_resolve_every_id() -> None:
    listed = CliRunner().invoke(app, ["mutants", "list"])
    head, *lines = listed.output.splitlines()
    assert head.split() == ["mutant", "stands", "for", "turns", "red", "on", "lanes"]
    assert [line.split()[0] for line in lines] == list(zoo())
    for one in zoo().values():
        told = describe(one)
        assert all(bug_id in told for bug_id in one.bugs)
        assert all(edit.module in told for edit in one.edits)
    shown = CliRunner().invoke(app, ["mutants", "show", next(iter(zoo()))])
    assert shown.output.strip() == describe(next(iter(zoo().values())))


def test_the_example_of_the_page_works(tmp_path: Path) -> None:
    """docs/mutants.md is what a newcomer copies."""
    page = Path("docs/mutants.md").read_text(encoding="utf-8")
    example = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "ours.py").write_text(example, encoding="utf-8")
    out = tmp_path / "zoo.json"
    arguments = ["mutants", "run", "--from", str(tmp_path), "--others", "0", "--no-control", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (told,) = json.loads(out.read_text(encoding="utf-8"))["mutants"]
    assert told["killed"]
    assert told["time_to_kill"] > 0


def test_an_id_that_there_is_not() -> None:
    result = CliRunner().invoke(app, ["mutants", "show", "nobody"])
    assert isinstance(result.exception, ValueError)
    with pytest.raises(ValueError, match="no mutant of that id"):
        raise result.exception
