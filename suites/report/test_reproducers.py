"""A failure of an engine in another process leaves a folder from which it can be seen again without the harness."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.contract import DrafterSetup, EngineSetup, Request, Run
from harness.engines.isolated import EngineFailure, IsolatedFactory
from harness.engines.isolated.engine import WORKERS
from harness.report.reproducers import Failure, reproduce
from suites.engines.isolated.test_faults import FAKE, FakeDialect
from suites.registration import suite

suite(seconds=0.6, stage="cpu", needs="cpu")

Make = Callable[[str], IsolatedFactory]
REQUESTS = tuple(Request(request_id=f"q{i}", prompt_token_ids=(5, 6, 7, 8 + i)) for i in range(5))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[IsolatedFactory] = []

    def factory(fault: str) -> IsolatedFactory:
        env = {"WIRE": str(WORKERS), "FAULT": fault}
        script = tmp_path / "workers" / "fake_worker.py"
        script.parent.mkdir()
        for file in (FAKE, WORKERS / "wire.py", WORKERS / "reproduce.py"):
            (script.parent / file.name).write_bytes(file.read_bytes())
        made.append(IsolatedFactory("fake", FakeDialect(), Path(sys.executable), script, environment=env))
        return made[-1]

    yield factory
    for one in made:
        one.close()


@pytest.fixture
def setup(tmp_path: Path) -> EngineSetup:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return EngineSetup(target=tmp_path / "target", drafter=DrafterSetup.chain("EAGLE", 2, tmp_path / "drafter"))


def failure(setup: EngineSetup, why: str, judge: Any = None) -> Failure:
    return Failure(setup=setup, requests=REQUESTS, warm=False, max_steps=10, why=why, judge=judge)


def again(folder: Path) -> tuple[int, str]:
    """The script, in another process, elsewhere, without our path."""
    done = subprocess.run(
        [sys.executable, "-s", str(folder / "reproduce.py")], capture_output=True, text=True, cwd="/", check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_crash(make: Make, setup: EngineSetup, tmp_path: Path) -> None:
    factory = make("raise_on_long")
    why = "the engine raised ValueError: a block of 5 rows was due"
    folder = reproduce(factory, failure(setup, why), tmp_path / "kept", 20.0)
    assert folder is not None
    case = json.loads((folder / "case.json").read_text())
    (only,) = case["order"]["requests"]
    assert len(only["prompt_token_ids"]) == 3
    assert (case["engine"], case["version"]) == ("fake", "1")
    assert case["words"]["target"] == "{here}/target"
    assert (folder / "drafter" / "config.json").is_file()
    code, said = again(folder)
    assert code == 1
    assert "ValueError: a block of 1 rows was due" in said


def test_a_wrong_answer(make: Make, setup: EngineSetup, tmp_path: Path) -> None:
    """The first request gets the second's output: it takes two."""

    def judge(run: Run, baseline: Run | None) -> bool:
        assert baseline is not None
        return [one.token_ids for one in run.completions] != [one.token_ids for one in baseline.completions]

    folder = reproduce(make("swapped"), failure(setup, "EQUAL-1: tokens differ", judge), tmp_path / "kept", 20.0)
    assert folder is not None
    case = json.loads((folder / "case.json").read_text())
    assert len(case["order"]["requests"]) == 2
    first = case["order"]["requests"][0]["request_id"] + "#0"
    assert case["seen"][first] != case["expected"][first]
    code, said = again(folder)
    assert code == 1
    assert "EQUAL-1: tokens differ" in said


def test_what_is_not_in_the_tokens(make: Make, setup: EngineSetup, tmp_path: Path) -> None:
    """The script cannot judge it, and says so."""
    found = reproduce(make(""), failure(setup, "COUNT-1: a row too few", lambda *_: True), tmp_path / "kept", 20.0)
    assert found is not None
    code, said = again(found)
    assert code == 2
    assert "The tokens are as expected. What the check found:\nCOUNT-1: a row too few" in said
    assert "finish_reason length" in said


def test_what_does_not_fail_again_leaves_nothing(make: Make, setup: EngineSetup, tmp_path: Path) -> None:
    assert reproduce(make(""), failure(setup, "EQUAL-1: once", lambda *_: False), tmp_path / "kept", 5.0) is None
    assert not (tmp_path / "kept").exists()


def test_another_crash_is_another_failure(make: Make, setup: EngineSetup, tmp_path: Path) -> None:
    found = reproduce(make("raise_on_long"), failure(setup, "the engine hangs"), tmp_path / "kept", 5.0)
    assert found is None


def test_the_fake_fails_as_it_should(make: Make, setup: EngineSetup) -> None:
    engine = make("raise_on_long").start(setup)
    with pytest.raises(EngineFailure, match="a block of 5 rows"):
        engine.run(REQUESTS)
