"""The plugin on engines with planted faults: what is printed, what is written, and that it can be reproduced."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

from suites.registration import suite
from suites.tiers import tiered

suite(seconds=15, stage="cpu", needs="cpu")

ROOT = Path(__file__).resolve().parents[2]
COUNT = "suites/conformance/test_count.py"
CONF = "suites/conformance/test_refusals.py"


class Inner(NamedTuple):
    """A pytest run inside this one."""

    code: int
    output: str
    cells: list[dict[str, Any]]


Run = Callable[..., Inner]


@pytest.fixture
def run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> Iterator[Run]:
    """Run the conformance tests in this process, which spares the import of torch; hypothesis is left as it was."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    # A test module keeps the hypothesis profile under which it was imported: the inner run must import its own.
    for name in [name for name in sys.modules if name.startswith("suites.conformance.test_")]:
        monkeypatch.delitem(sys.modules, name)
    scorecard = tmp_path / "scorecard.json"
    options = ["-q", "--no-shrink", "-p", "no:cacheprovider", "--scorecard", str(scorecard)]
    seed = f"--hypothesis-seed={pytestconfig.getoption('hypothesis_seed')}"

    def inner(*arguments: str) -> Inner:
        capfd.readouterr()
        code = pytest.main([*arguments, *options, seed])
        cells = json.loads(scorecard.read_text(encoding="utf-8")) if scorecard.exists() else []
        captured = capfd.readouterr()
        return Inner(int(code), captured.out + captured.err, cells)

    name = settings.get_current_profile_name()
    profile = settings.get_profile(name)
    yield inner
    settings.register_profile(name, profile)
    settings.load_profile(name)


def planted(name: str) -> list[str]:
    return ["--engine", f"suites.report.planted:{name}"]


def failing_example(output: str) -> str:
    match = re.search(r"batch=Batch\((.*?)You can reproduce", output, flags=re.DOTALL)
    assert match is not None, output
    return match.group(1)


@pytest.mark.parametrize("way", tiered(["in a shell", "in this process"], "in this process"))
def test_a_failure_says_where_and_how_to_see_it_again(run: Run, way: str) -> None:
    test = f"{COUNT}::test_rows_per_token[STANDALONE]"
    code, output, cells = run(test, *planted("WrongUsage"))
    assert code == pytest.ExitCode.TESTS_FAILED
    for word in ("COUNT-1: usage.completion_tokens", "where:", "expected:", "got:", "reproduce: "):
        assert word in output
    (cell,) = cells
    assert (cell["drafter"], cell["invariant"], cell["status"]) == ("STANDALONE", "COUNT-1", "fail")
    command = cell["failures"][0]["reproduce"]
    assert test in command
    again = run(*_arguments(command)) if way == "in this process" else _shell(command, "--no-shrink")
    assert again.code == pytest.ExitCode.TESTS_FAILED
    assert failing_example(again.output) == failing_example(output)


def _arguments(command: str) -> list[str]:
    """Those of a command that runs pytest."""
    program, *arguments = shlex.split(command)
    assert Path(program).name == "pytest"
    return arguments


def _shell(command: str, *options: str) -> Inner:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*shlex.split(command), *options], cwd=ROOT, env=inherited, capture_output=True, text=True, check=False
    )
    return Inner(done.returncode, done.stdout, [])


@pytest.mark.parametrize("suite", [COUNT, CONF])
def test_a_refused_drafter_is_no_failure(run: Run, suite: str) -> None:
    """Nor does a broken checkpoint pass for declined where every drafter is declined."""
    selection = (suite, "--drafter", "EAGLE", *(("--invariant", "CONF-2") if suite == CONF else ()))
    code, output, cells = run(*selection, *planted("RefusesDrafters"))
    assert code == pytest.ExitCode.OK, output
    assert {cell["status"] for cell in cells} == {"refused"}
    assert all("leave it out" in cell["message"] for cell in cells)


def test_acceptance_that_is_not_told_is_not_judged(run: Run) -> None:
    selection = ("suites/conformance/test_accept.py", "--drafter", "NGRAM", "-k", "test_any_schedule or always_drafted")
    code, output, cells = run(*selection, *planted("HidesAcceptance"))
    assert code == pytest.ExitCode.OK, output
    assert {cell["invariant"]: cell["status"] for cell in cells} == {"ACCEPT-1": "refused", "ACCEPT-2": "refused"}
    assert all("it does not tell accept lengths on the lane NGRAM" in cell["message"] for cell in cells)


def test_a_hang_fails_and_the_run_goes_on(run: Run) -> None:
    tests = [f"{COUNT}::test_rows_per_token[{drafter}]" for drafter in ("EAGLE", "none")]
    code, output, cells = run(*tests, *planted("Hangs"), "--deadline", "2")
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert {cell["drafter"]: cell["status"] for cell in cells}["EAGLE"] == "fail"
    assert len(cells) == 2
    assert "no answer within 2 s" in output


@pytest.mark.parametrize(
    ("option", "name"),
    [("--drafter", "EAGEL"), ("--invariant", "COUNT-9"), ("--engine", "nobody"), ("--engine", "no.x:Y")],
)
def test_a_wrong_name_is_named(run: Run, option: str, name: str) -> None:
    code, output, cells = run(COUNT, option, name)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert name in output
    assert not cells


SMALL_SUITE = """
import pytest

@pytest.mark.invariant("COUNT-1")
@pytest.mark.drafters("none", "EAGLE")
def test_something(lane, record_examples):
    record_examples(17)
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_cell_without_a_test_fails_the_run(pytester: pytest.Pytester, workers: str) -> None:
    pytester.makeini("[pytest]")  # its root is here, wherever temporary files lie
    suite = pytester.mkdir("suites") / "conformance"
    suite.mkdir()
    (suite / "test_small.py").write_text(SMALL_SUITE, encoding="utf-8")
    arguments = ["suites", "-n", workers, "--drafter", "EAGLE", "--drafter", "none"]
    result = pytester.runpytest_inprocess(*arguments, "--invariant", "COUNT-1", "--invariant", "KV-1")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*COUNT-1*17*17*", "*KV-1*ERROR*ERROR*", "*error KV-1 EAGLE: no test ran*"])
    cells = json.loads((pytester.path / "build" / "scorecard.json").read_text(encoding="utf-8"))
    assert [(cell["drafter"], cell["invariant"], cell["status"], cell["examples"]) for cell in cells] == [
        ("EAGLE", "COUNT-1", "pass", 17),
        ("EAGLE", "KV-1", "error", 0),
        ("none", "COUNT-1", "pass", 17),
        ("none", "KV-1", "error", 0),
    ]
    assert {cell["version"] for cell in cells} == {version("draftproof")}


@pytest.mark.parametrize(
    ("narrowed", "part"),
    [
        ((), ""),
        (("--drafter", "none"), "--drafter none"),
        (("--drafter", "none", "--invariant", "COUNT-1"), "--drafter none --invariant COUNT-1"),
        (("-k", "something"), "some of its tests"),
        (("-k", "something", "--drafter", "none"), "some of its tests"),
    ],
)
def test_a_scorecard_says_of_which_part_of_a_run_it_is(
    pytester: pytest.Pytester, narrowed: tuple[str, ...], part: str
) -> None:
    """In the file and in the last line. What was not asked for is neither missed nor shown. Some tests, as a line that
    shows a failure again runs them, leave alone what a whole run has found."""
    pytester.makeini("[pytest]")  # its root is here, wherever temporary files lie
    suite = pytester.mkdir("suites") / "conformance"
    suite.mkdir()
    (suite / "test_small.py").write_text(SMALL_SUITE.replace('"COUNT-1"', '"COUNT-1", "EQUAL-1"'), encoding="utf-8")
    told = pytester.runpytest_inprocess("suites", *narrowed)
    complete = "--invariant" in narrowed or "-k" in narrowed
    assert told.ret == (pytest.ExitCode.OK if complete else pytest.ExitCode.TESTS_FAILED)
    name = "scorecard-of-some-tests.json" if "-k" in narrowed else "scorecard.json"
    card = pytester.path / "build" / name
    told.stdout.fnmatch_lines([f"written: build/{name}" + (f", a part of a run: {part}" if part else "")])
    assert [one.name for one in card.parent.glob("*.json")] == [name]
    cells = json.loads(card.read_text(encoding="utf-8"))
    assert {cell["part"] for cell in cells} == {part}
    if "--invariant" in narrowed:
        assert {cell["invariant"] for cell in cells} == {"COUNT-1"}


TWO_CHECKS = """
import pytest
from harness.invariants import InvariantError, Violation

@pytest.mark.invariant("COUNT-1", "EQUAL-1")
@pytest.mark.parametrize("red", [("EQUAL-1",), ("COUNT-1", "EQUAL-1"), ("LAW-1",), ()])
def test_two(lane, red):
    if red:
        raise InvariantError([Violation(invariant=name, message="planted") for name in red])
    raise RuntimeError("the engine is gone")
"""


@pytest.mark.parametrize(
    ("red", "cells"),
    [
        ("red0", {"EQUAL-1"}),
        ("red1", {"COUNT-1", "EQUAL-1"}),
        ("red2", {"LAW-1"}),
        ("red3", {"COUNT-1", "EQUAL-1"}),
    ],
)
def test_red_is_what_was_found_broken(pytester: pytest.Pytester, red: str, cells: set[str]) -> None:
    """Whether the test asks for it or not; all that it asks for where the engine is gone."""
    pytester.makeini("[pytest]")  # its root is here, wherever temporary files lie
    pytester.makepyfile(TWO_CHECKS)
    card = pytester.path / "scorecard.json"
    pytester.runpytest_inprocess("--drafter", "none", "-k", red, "--scorecard", str(card))
    told = json.loads(card.read_text(encoding="utf-8"))
    assert {cell["invariant"] for cell in told if cell["status"] == "fail"} == cells


DYING = """
import os
import pytest

@pytest.mark.invariant("COUNT-1", "KV-1")
@pytest.mark.parametrize("dies", [False, True])
def test_it(lane, dies):
    if dies:
        os._exit(1)
"""


def test_a_worker_that_dies_fails_what_it_was_busy_with(pytester: pytest.Pytester) -> None:
    """An engine may take its process along: the scorecard says so, the command does, and the run goes on."""
    pytester.makeini("[pytest]")  # its root is here, wherever temporary files lie
    pytester.makepyfile(DYING)
    card = pytester.path / "scorecard.json"
    options = ["-n", "1", "--drafter", "none", "--scorecard", str(card)]
    assert pytester.runpytest_inprocess(*options).ret == pytest.ExitCode.TESTS_FAILED
    told = {cell["invariant"]: cell for cell in json.loads(card.read_text(encoding="utf-8"))}
    assert {name: (cell["status"], cell["examples"]) for name, cell in told.items()} == {
        "COUNT-1": ("fail", 1),
        "KV-1": ("fail", 1),
    }
    assert "crashed while running" in json.dumps(told["KV-1"])


@pytest.mark.parametrize("option", ["--scorecard", "--record"])
def test_folders_that_take_nothing_are_refused_at_once(pytester: pytest.Pytester, option: str) -> None:
    pytester.makeini("[pytest]")
    pytester.makepyfile(SMALL_SUITE)
    (pytester.path / "file").write_text("")
    result = pytester.runpytest_inprocess("--drafter", "none", option, "file/below/it.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{option} *file/below*: *; name a folder that can be written to*"])


def test_no_seeds_are_refused(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--seeds", "0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--seeds 0: must be at least 1*"])


INTERRUPTED = """
import pytest

@pytest.mark.invariant("COUNT-1")
@pytest.mark.parametrize("stop", [False, True])
def test_it(lane, stop):
    if stop:
        raise KeyboardInterrupt
"""


def test_a_run_that_is_interrupted_leaves_no_scorecard(pytester: pytest.Pytester) -> None:
    """What had passed by then is no verdict on the engine."""
    pytester.makeini("[pytest]")
    pytester.makepyfile(INTERRUPTED)
    card = pytester.path / "scorecard.json"
    result = pytester.runpytest_inprocess("--drafter", "none", "--scorecard", str(card), no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([f"{card}: not written, since the run was interrupted"])
    assert not card.exists()


NO_ROOM = """
import errno
import pytest
from harness.record import NotRecorded

@pytest.mark.invariant("COUNT-1")
def test_it(lane):
    raise NotRecorded("traces/x: the run was not recorded")
"""


def test_no_room_for_a_record_is_no_fault_of_the_engine(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]")
    pytester.makepyfile(NO_ROOM)
    card = pytester.path / "scorecard.json"
    pytester.runpytest_inprocess("--drafter", "none", "--scorecard", str(card))
    assert [cell["status"] for cell in json.loads(card.read_text(encoding="utf-8"))] == ["error"]


def test_no_room_for_the_scorecard(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one stays as it was, and the exit code says that this run has none."""
    pytester.makeini("[pytest]")
    pytester.makepyfile(SMALL_SUITE)
    card = pytester.path / "scorecard.json"
    card.write_text("[]")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    result = pytester.runpytest_inprocess("--drafter", "none", "--scorecard", str(card))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines([f"{card}: not written: No space left on device; *"])
    assert [path.name for path in pytester.path.rglob("*scorecard.json*")] == ["scorecard.json"]
    assert card.read_text() == "[]"
