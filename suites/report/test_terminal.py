"""What `draftproof run` prints: 80 columns, plain where nobody looks, colours only where they are wanted."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from harness.cli import _asked
from harness.report.compare import differences
from harness.report.scorecard import Scorecard
from harness.report.table import render
from harness.workloads.lanes import LANES
from suites.registration import suite
from suites.report.page_data import outcome

suite(seconds=2.2, stage="cpu", needs="cpu")

ESCAPE = "\x1b"
LONG = "somebody.elses.package.with_a_long_name.adapter:TheFactoryOfTheEngineThatIsToBeTestedHere"


def card(engine: str) -> Scorecard:
    made = Scorecard()
    for lane in LANES:
        made.add(outcome("pass", lane, "ALIAS-1", engine=engine, examples=123456))
        made.add(outcome("error" if lane == "MTP" else "refused", lane, "COUNT-1", engine=engine, message="why " * 60))
    return made


@pytest.mark.parametrize("engine", ["reference", LONG])
def test_the_summary_fits_80_columns(engine: str) -> None:
    text = render(card(engine), colour=False)
    assert max(map(len, text.splitlines())) <= 80
    assert engine in text.replace("\n", "")
    cells = [cell.to_json() for cell in card(engine).cells.values()]
    told = differences(cells, [engine, "reference@2"])
    assert max(map(len, told.splitlines())) <= 80
    assert "refused" in told


TEST = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_it(number):
    assert number != 2, "wrong"
"""
MARKED = """
import pytest

@pytest.mark.invariant("COUNT-1")
def test_it():
    assert False
"""


def on_a_terminal(folder: Path, *options: str, **environment: str) -> str:
    """What pytest writes to a terminal of 80 columns."""
    terminal, its_end = os.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "NO_COLOR", "CI"))}
    # Without the plugin, which would import torch: what is looked at is how tests are told as they run.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:draftproof", *options]
    settings = {**inherited, "TERM": "xterm-256color", **environment}
    with subprocess.Popen(command, cwd=folder, env=settings, stdin=its_end, stdout=its_end, stderr=its_end) as process:
        os.close(its_end)
        seen = b""
        while True:
            try:
                part = os.read(terminal, 4096)
            except OSError:  # how Linux tells that the other end is closed
                break
            if not part:
                break
            seen += part
        os.close(terminal)
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    return seen.decode()


@pytest.fixture
def two_tests(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TEST)
    return tmp_path


def test_a_terminal_gets_a_bar_and_what_is_red_as_it_comes(two_tests: Path) -> None:
    seen = on_a_terminal(two_tests, "-p", "harness.report.progress", "-o", "console_output_style=classic")
    during, _, after = seen.partition("FAILURES")
    assert "4/4" in during
    assert "1 red" in during
    assert "✗ test_it.py::test_it[2]" in during
    assert "." not in during.replace("test_it.py", ""), "tests are told twice"
    assert "1 failed" in after
    assert "3 passed" in after


def test_without_colours_where_they_are_not_wanted(two_tests: Path) -> None:
    seen = on_a_terminal(two_tests, NO_COLOR="1")
    assert "..F." in seen
    assert ESCAPE not in seen


@pytest.mark.parametrize("colour", ["auto", "yes"])
def test_the_scorecard_is_plain_where_nobody_looks(pytester: pytest.Pytester, colour: str) -> None:
    pytester.makeini("[pytest]")
    pytester.makepyfile(MARKED)
    told = pytester.runpytest_inprocess("-q", f"--color={colour}").stdout.str()
    assert "1 cells: 1 fail" in told
    assert (ESCAPE in told) == (colour == "yes")


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_is_asked_for_on_a_terminal_only(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.cli.Console", lambda: Console(force_terminal=terminal, force_interactive=terminal))
    assert ("harness.report.progress" in _asked("reference", [], tmp_path)) == terminal
