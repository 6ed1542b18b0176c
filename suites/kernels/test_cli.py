"""`draftproof kernels`: what it lists, what it compiles, and what it says where it cannot."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from harness.cli import app, main
from harness.report import kernels as tables
from kernels import KERNELS, compile
from kernels.compile import TARGETS, Compiled
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

FINE = Compiled(kernel="fill_bonus_tokens", variant=0, target="sm_90", registers=20, spills=0, shared=64)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["kernels", *arguments], env={"COLUMNS": "1000", "NO_COLOR": "1"})


def give(result: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of compiling, which has its own tests."""
    results = [dataclasses.replace(result, target=target) for target in TARGETS]
    monkeypatch.setattr(compile, "compile_all", lambda *_, **__: results)


def test_lists_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "compiled_targets", lambda name: ["sm_90"] if name == "fill_bonus_tokens" else [])
    result = invoke()
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines()[1:]}
    assert list(rows) == list(KERNELS)
    for name, row in rows.items():
        assert KERNELS[name].shapes in row
        assert tables.runs_here() in row
        assert ", ".join(KERNELS[name].properties) in row
    assert rows["fill_bonus_tokens"].split()[-1] == "sm_90"
    assert rows["build_tree"].rstrip().endswith("nothing yet (--compile)")


def test_prints_what_binaries_need(monkeypatch: pytest.MonkeyPatch) -> None:
    give(FINE, monkeypatch)
    result = invoke("--kernel", "fill_bonus_tokens", "--compile")
    assert result.exit_code == 0
    header, row = result.stdout.splitlines()
    assert header.split() == ["name", "variant", *TARGETS]
    assert row.split() == ["fill_bonus_tokens", "BLOCK=128", *["20", "/", "0", "/", "64"] * len(TARGETS)]


@pytest.mark.parametrize(
    ("change", "cell", "message"),
    [
        ({"spills": 8}, "20 / 8 / 64", "20 registers and 8 spilled"),
        ({"error": "no such thing"}, "failed", "no such thing"),
    ],
)
def test_a_bad_binary_ends_in_a_failure(
    change: dict[str, Any], cell: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(dataclasses.replace(FINE, **change), monkeypatch)
    result = invoke("--kernel", "fill_bonus_tokens", "--compile")
    assert result.exit_code == 1
    assert result.stdout.count(cell) == len(TARGETS)
    assert f"fill_bonus_tokens[0] for sm_90: {message}" in result.stderr


@pytest.mark.parametrize(
    ("device", "variable", "expected"),
    [(True, "0", "compiled triton"), (False, "0", "torch"), (False, "1", "interpreted triton")],
)
def test_where_it_runs(device: bool, variable: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    monkeypatch.setenv("TRITON_INTERPRET", variable)
    monkeypatch.setattr(tables, "interpreted", lambda: variable == "1")
    assert tables.runs_here() == expected


@pytest.mark.parametrize(
    ("arguments", "message"), [((), "need Triton, which is not installed"), (("--kernel", "nope"), "there is none")]
)
def test_one_line_says_what_is_wrong(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not arguments:
        monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(sys, "argv", ["draftproof", "kernels", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
