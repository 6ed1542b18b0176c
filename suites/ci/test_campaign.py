"""`draftproof campaign` with two Ray workers, one of which is killed: every finding is there, once."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from ci.campaign_state import Campaign
from suites.ci.redis_server import serving
from suites.registration import suite
from suites.tiers import FULL

suite(seconds=13, stage="cpu", needs="cpu")

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from suites.ci.command import main; main()", "campaign"]
PATIENCE = 240.0
"""Seconds; the machine may have other work."""

PLANTED = """
import os, time
from pathlib import Path

from hypothesis import given, settings, strategies as st

HERE = Path(__file__).parent


@settings(max_examples=100)
@given(numbers=st.lists(st.integers(0, 1000)))
def test_every_seed_finds_this(numbers):
    assert all(number < 100 for number in numbers), f"number {max(numbers)} is too large"


@settings(max_examples=1)
@given(st.none())
def test_only_the_first_run_finds_this(_):
    try:
        (HERE / "first").touch(exist_ok=False)
    except FileExistsError:
        return
    (HERE / "killed").write_text(f"{os.getppid()} {os.getpid()}")
    raise AssertionError("seen once")


@settings(max_examples=1)
@given(st.none())
def test_waits(_):
    while not (HERE / "go").exists():
        time.sleep(0.02)
"""


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the command; what still runs when the test is over is ended."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = []

    def begin(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, "--out", str(tmp_path / "out"), *arguments],
            cwd=ROOT,
            env={**inherited, "PYTHONPATH": paths, "COLUMNS": "200", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            process.terminate()


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


def read(tmp_path: Path) -> Campaign:
    return msgspec.json.decode((tmp_path / "out" / "campaign.json").read_bytes(), type=Campaign)


def until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def listening(process: psutil.Process) -> set[str]:
    """Addresses on which a process and its descendants wait for connections."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        try:
            found |= {each.laddr.ip for each in one.net_connections() if each.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return found


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_lost_worker_loses_no_finding(tmp_path: Path, start: Start) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="d-"))  # sockets lie there, whose paths must be short
    folder = tmp_path / "planted"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_planted.py").write_text(PLANTED)
    arguments = ["--seeds", "0:3", "--workers", "2", "--suite", str(folder)]
    process = start(*arguments, TMPDIR=str(temporary), HOME=str(tmp_path))
    until((folder / "killed").exists, process)
    worker, run = map(int, (folder / "killed").read_text().split())
    runs = tmp_path / "out" / "runs"
    until(lambda: any("seen once" in path.read_text() for path in runs.glob("*/failures.jsonl")), process)
    addresses = listening(psutil.Process(process.pid))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in temporary.glob("draftproof-*/token")}
    os.kill(worker, signal.SIGKILL)
    until(lambda: not is_running(run), process)
    (folder / "go").touch()
    code, output = finished(process)

    assert code == 1, output
    assert not (tmp_path / ".ray").exists()
    assert not list(temporary.iterdir())
    assert modes == {0o600}
    assert {address.removeprefix("::ffff:") for address in addresses} <= {"127.0.0.1", "::1"}
    campaign = read(tmp_path)
    found = {finding.first.test.partition("::")[2]: finding for finding in campaign.findings.values()}
    assert sorted(found) == ["test_every_seed_finds_this", "test_only_the_first_run_finds_this"]
    often, once = found["test_every_seed_finds_this"], found["test_only_the_first_run_finds_this"]
    assert often.seeds == [0, 1, 2]
    assert len(once.seeds) == 1
    assert "numbers=[100]" in often.first.example
    assert often.first.message.startswith("number 100 is too large")
    attempts = {task.seed: task.attempts for task in campaign.tasks.values()}
    assert attempts == {seed: 2 if seed in once.seeds else 1 for seed in range(3)}
    assert "its worker was lost" in output
    assert "begun again: 1; could not be done: 0" in output

    temporary.rmdir()

    code, again = finished(start(*arguments))
    assert code == 1
    assert read(tmp_path) == campaign
    assert re.search(r"seeds done: 3; .*findings: 2", again)


@FULL
@pytest.mark.parametrize("where", ["a folder", "a server"])
def test_a_fault_of_an_engine_is_one_finding_on_all_seeds_and_lanes(
    tmp_path: Path, start: Start, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed in so many meets it by itself; the next ones are shown what it met."""
    arguments = ["--workers", "2", "--engine", "suites.report.planted:WrongUsage", "--tier", "fast"]
    arguments += ["--suite", "suites/conformance/test_count.py", "--invariant", "COUNT-1"]
    arguments += ["--drafter", "EAGLE", "--drafter", "none"]
    with serving("pass-word") as url:
        if where == "a server":
            monkeypatch.setenv("DRAFTPROOF_REDIS_PASSWORD", "pass-word")
            arguments += ["--redis", url]
        for seeds in ("3", "3:6"):
            code, output = finished(start("--seeds", seeds, *arguments))
            assert code == 1, output
            assert "pass-word" not in output
    campaign = read(tmp_path)
    (finding,) = campaign.findings.values()
    assert finding.first.invariants == ("COUNT-1",)
    assert finding.drafters == ["EAGLE", "none"]
    assert finding.seeds == [3, 4, 5]
    assert "pass-word" not in "\n".join(path.read_text() for path in tmp_path.rglob("*.json*"))
