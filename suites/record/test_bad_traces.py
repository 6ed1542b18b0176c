"""Files that are no trace, or not a whole one, are refused with the line and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.record import BadTrace, read
from harness.record.schema import TENSORS, TRACE
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.scenarios import ragged_five
from suites.registration import suite

suite(seconds=0.5, stage="cpu", needs="cpu")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Traces of one batch, with and without speculation."""
    root = tmp_path_factory.mktemp("record")
    found = {}
    for name in ("EAGLE", "none"):
        Lane("reference", LANES[name], root / "known", record=root / name).run_batch(ragged_five(vocabulary("walk")))
        (found[name],) = (root / name).iterdir()
    return found


@pytest.fixture
def trace(recorded: dict[str, Path], tmp_path: Path) -> Path:
    for name in (TRACE, TENSORS):
        (tmp_path / name).write_bytes((recorded["EAGLE"] / name).read_bytes())
    return tmp_path


def spoil(trace: Path, change: Callable[[list[str]], list[str]]) -> None:
    lines = (trace / TRACE).read_text(encoding="utf-8").splitlines()
    (trace / TRACE).write_text("\n".join(change(lines)), encoding="utf-8")


def reworded(number: int, **fields: object) -> Callable[[list[str]], list[str]]:
    def change(lines: list[str]) -> list[str]:
        told = json.loads(lines[number])
        told["value"].update(fields)
        lines[number] = json.dumps(told)
        return lines

    return change


SPOILT: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "cut_between_lines": (lambda lines: lines[:-3], "the end is missing; the file was cut"),
    "cut_in_a_line": (lambda lines: [*lines[:-1], lines[-1][:20]], "not a whole line of JSON"),
    "a_line_less": (lambda lines: lines[:4] + lines[5:], "line 5: this is line 5 of the trace; lines are missing"),
    "two_lines_swapped": (lambda lines: [*lines[:1], lines[2], lines[1], *lines[3:]], "out of order"),
    "header_alone_missing": (lambda lines: lines[1:], "the first line must be its header"),
    "another_program": (lambda _lines: ['{"level": "info"}'], "this is no draftproof-trace"),
    "no_json": (lambda _lines: ["\x00\x01 binary"], "this is no draftproof-trace"),
    "empty": (lambda _lines: [], "the end is missing"),
    "another_version": (reworded(0, version=99), "version 99; this Draftproof reads version 1"),
    "another_format": (reworded(0, format="pcap"), "this is no draftproof-trace"),
    "a_field_of_another_type": (reworded(1, prompt_token_ids="x"), "not a request"),
    "a_value_that_cannot_be": (reworded(1, prompt_token_ids=[]), "prompt_token_ids"),
    "counts_that_differ": (reworded(-1, num_steps=3), "the end tells of 3 steps and there are"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_file_is_refused(trace: Path, name: str) -> None:
    change, message = SPOILT[name]
    spoil(trace, change)
    with pytest.raises(BadTrace, match=message):
        read(trace)


def test_missing_and_damaged_tensors(trace: Path) -> None:
    whole = (trace / TENSORS).read_bytes()
    (trace / TENSORS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadTrace, match="not safetensors, or not whole"):
        read(trace)
    (trace / TENSORS).unlink()
    with pytest.raises(BadTrace, match="tensor 's0' is not in"):
        read(trace)


@pytest.mark.parametrize("view", [{"offset": 10**9}, {"shape": [-1]}, {"stride": [1, 1, 1, 1]}])
def test_a_view_that_reaches_outside_is_refused(trace: Path, view: dict[str, object]) -> None:
    def change(lines: list[str]) -> list[str]:
        place = next(i for i, line in enumerate(lines) if '"completion"' in line)
        told = json.loads(lines[place])
        told["value"]["hidden_states"]["prefill"].update(view)
        lines[place] = json.dumps(told)
        return lines

    spoil(trace, change)
    with pytest.raises(BadTrace, match=r"reaches beyond|is no tensor"):
        read(trace)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="there is no such file"):
        read(tmp_path / "nowhere")


def test_the_command_checks_with_a_baseline_and_with_closed_forms(recorded: dict[str, Path]) -> None:
    known = ["--family", "walk", "--drafter", "EAGLE", "--baseline", str(recorded["none"])]
    result = CliRunner().invoke(app, ["check", str(recorded["EAGLE"]), *known])
    assert result.exit_code == 0, result.output
    assert "nothing is broken" in result.output
    assert "EQUAL-1" in result.output


def test_the_command_says_what_is_broken(trace: Path) -> None:
    def change(lines: list[str]) -> list[str]:
        place = next(i for i, line in enumerate(lines) if '"completion"' in line)
        told = json.loads(lines[place])
        told["value"]["usage"]["completion_tokens"] += 1
        lines[place] = json.dumps(told)
        return lines

    spoil(trace, change)
    result = CliRunner().invoke(app, ["check", str(trace)])
    assert result.exit_code == 1
    assert "COUNT-1" in result.output


@pytest.mark.parametrize(
    "names", [["--family", "walk"], ["--drafter", "EAGLE"], ["--family", "x", "--drafter", "EAGLE"]]
)
def test_closed_forms_need_both_names(recorded: dict[str, Path], names: list[str]) -> None:
    result = CliRunner().invoke(app, ["check", str(recorded["EAGLE"]), *names])
    assert isinstance(result.exception, ValueError)
