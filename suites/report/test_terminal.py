"""What `draftproof run` prints: 80 columns, plain where nobody looks, colours only where they are wanted; how far it
is, and what is missing when it is interrupted."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness import cli
from harness.cli import app
from harness.invariants import INVARIANTS
from harness.report.compare import differences
from harness.report.progress import SHOWN, Log
from harness.report.scorecard import Scorecard
from harness.report.table import render
from harness.workloads.lanes import LANES, catalogue
from suites.registration import suite
from suites.report.page_data import outcome

suite(seconds=9, stage="cpu", needs="cpu")

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
    seen = on_a_terminal(two_tests, *SHOWN)
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
    assert "1 cell: 1 fail" in told
    assert (ESCAPE in told) == (colour == "yes")


def in_a_pipe(folder: Path, *options: str) -> str:
    """What pytest writes where nobody looks."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:draftproof", *options]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_log_gets_a_line_now_and_then(two_tests: Path, workers: str) -> None:
    during, _, after = in_a_pipe(two_tests, "-n", workers, *SHOWN).partition("FAILURES")
    lines = during.splitlines()
    assert "4 tests" in lines
    assert "✗ test_it.py::test_it[2]" in lines
    assert [line for line in lines if line.startswith("4 of 4 tests, 1 red, 0:")]
    assert ESCAPE not in during
    assert "FAILED test_it.py::test_it[2]" in after
    assert "1 failed" in after
    assert "3 passed" in after


def told_of(monkeypatch: pytest.MonkeyPatch, total: int, pause: float) -> list[str]:
    """What a log gets of so many tests, each of which takes `pause` seconds."""
    text, now = StringIO(), iter(number * pause for number in range(total + 1))
    monkeypatch.setattr("harness.report.progress.time.monotonic", lambda: next(now))
    log = Log(Console(file=text))
    log.total = total
    for number in range(total):
        log.done = number + 1
        log.tell()
    return text.getvalue().splitlines()


def test_a_log_is_neither_silent_nor_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each tenth, after half a minute without one, and none a moment after another."""
    assert len(told_of(monkeypatch, 1000, 0.1)) == 10
    assert len(told_of(monkeypatch, 10, 100.0)) == 10
    slow = told_of(monkeypatch, 100, 16.0)
    assert len(slow) == 50
    assert slow[0] == "2 of 100 tests, 0 red, 0:32"
    assert told_of(monkeypatch, 10, 0.01) == ["10 of 10 tests, 0 red, 0:00"]


def test_rows_of_a_list_are_whole_in_a_pipe() -> None:
    """And have no blanks behind them."""
    done = CliRunner().invoke(app, ["invariants"])
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert set(lines) == {"id", *catalogue()}
    for name, invariant in INVARIANTS.items():
        assert lines[name].endswith(invariant.statement)
        assert all(need in lines[name] for need in invariant.needs)


STUCK = """
import time
from pathlib import Path

def test_first():
    assert not list(Path(OUT).glob("*.*")), "an earlier run has left something"

def test_second():
    (Path(OUT) / "reached").write_text("")
    time.sleep(120)

def test_third():
    pass
"""
# What a shell runs in the background ignores Ctrl-C, and all that it starts.
COMMAND = """
import signal
import sys
from pathlib import Path
from harness import cli
signal.signal(signal.SIGINT, signal.default_int_handler)
cli.SUITE = Path(sys.argv.pop(1))
cli.main()
"""


@pytest.mark.parametrize("engines", [1, 2])
def test_a_run_that_is_interrupted_says_what_is_missing(tmp_path: Path, engines: int) -> None:
    """It ends with 130 and leaves no file that looks like that of a whole run, be it its own or an earlier one's."""
    out = tmp_path / "out"
    first = out if engines == 1 else out / "reference"
    first.mkdir(parents=True)
    old = [folder / name for folder in (out, first) for name in ("scorecard.json", "junit.xml")]
    for file in old:
        file.write_text("of an earlier run")
    (tmp_path / "test_stuck.py").write_text(STUCK.replace("OUT", repr(str(first))))
    arguments = ["run", "--workers", "0", "--out", str(out), *["--engine", "reference"] * engines]
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path / "test_stuck.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        while process.poll() is None and not (first / "reached").exists():
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        told, _ = process.communicate()
    assert process.returncode == 130, told
    assert "interrupted after 1 of 3 tests" in told
    assert told.splitlines()[-1].startswith(f"interrupted. {first}: no scorecard.json and no junit.xml")
    assert "Traceback" not in told
    assert "✗" not in told
    assert not [file for file in old if file.exists()]


def test_a_run_has_no_warnings_and_leaves_nothing_where_it_was_started(tmp_path: Path) -> None:
    """Nothing of ours is imported before pytest can rewrite its asserts, wherever it finds our package described."""
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    here = tmp_path / "here"
    described = here / "draftproof.egg-info"
    described.mkdir(parents=True)
    for name, text in (
        ("PKG-INFO", "Metadata-Version: 2.1\nName: draftproof\nVersion: 0.1.0\n"),
        ("SOURCES.txt", "harness/__init__.py\nharness/plugin.py\n"),
        ("entry_points.txt", "[pytest11]\ndraftproof = harness.plugin\n"),
    ):
        (described / name).write_text(text)
    paths = os.pathsep.join([str(Path(cli.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(tmp_path / "test_it.py"), "run", "--workers", "0", "--out", str(tmp_path)],
        cwd=here,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed in" in done.stdout
    assert "arning" not in done.stdout
    assert [path.name for path in here.iterdir()] == [described.name]
