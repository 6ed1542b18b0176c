"""Every suite is registered, and one that is not is named together with the mend."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ci import registry, shards, stages
from ci.registry import ROOT
from suites.registration import suite

suite(seconds=5, stage="cpu", needs="cpu")

GOOD = 'suite(seconds=2.5, stage="cpu", needs="cpu")'
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A repository with one suite of those lines -> its root."""

    def write(*lines: str) -> Path:
        file = tmp_path / "suites" / "things" / "test_thing.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([registry.IMPORT, *lines, ""]), encoding="utf-8")
        return tmp_path

    return write


def test_every_suite_of_this_repository_is_registered() -> None:
    found = registry.read()
    assert found.objections == ()
    files = {path.relative_to(ROOT).as_posix() for path in registry.SUITES.rglob("test_*.py")}
    assert {one.path for one in found.registrations} == files


def test_a_registration_is_read_without_running_the_file(write: Write) -> None:
    root = write(GOOD, "raise SystemExit('this was run')")
    (one,) = registry.must_read(root)
    assert (one.path, one.seconds, one.stage, one.needs) == ("suites/things/test_thing.py", 2.5, "cpu", "cpu")


def test_a_file_may_be_in_several_stages(write: Write) -> None:
    found = registry.must_read(write(GOOD, 'suite(seconds=9, stage="gpu", needs="1-gpu")'))
    assert [(one.stage, one.needs) for one in found] == [("cpu", "cpu"), ("gpu", "1-gpu")]


@pytest.mark.parametrize(
    ("lines", "fault", "mend"),
    [
        ([], "is not registered", f"add after its imports `{registry.IMPORT}` and the line `{registry.EXAMPLE}`"),
        (["if True:", f"    {GOOD}"], "is not registered", registry.EXAMPLE),
        ([GOOD, GOOD], "registered twice for stage 'cpu'", "take one of the two lines away"),
        (['suite(seconds=2, stage="cpu", needs="tpu")'], "needs='tpu'", "choose from cpu, 1-gpu"),
        (['suite(seconds=2, stage="weekly", needs="cpu")'], "stage='weekly'", "choose from cpu, gpu"),
        (['suite(seconds=2, stage="full", needs="cpu")'], "stage='full'", "choose from cpu, gpu"),
        (['suite(seconds=2, stage="cpu", needs="hopper")'], "hosted machines only", "take stage gpu"),
        (["S = 2", 'suite(seconds=S, stage="cpu", needs="cpu")'], "line 3: seconds=S", "write a positive number"),
        (['suite(seconds=0, stage="cpu", needs="cpu")'], "seconds=0", "write a positive number"),
        (['suite(seconds=True, stage="cpu", needs="cpu")'], "seconds=True", "write a positive number"),
        (['suite(seconds=2, stage=f"cpu", needs="cpu")'], "stage=f'cpu'", "write a string in quotes"),
        (['suite(seconds=2, stage="cpu")'], "lacks needs", registry.EXAMPLE),
        (['suite(2, stage="cpu", needs="cpu")'], "by name and nothing else", registry.EXAMPLE),
        (['suite(seconds=2, stage="cpu", needs="cpu", flaky=True)'], "by name and nothing else", registry.EXAMPLE),
        (['suite(**{"seconds": 2})'], "by name and nothing else", registry.EXAMPLE),
        (["def test_(:"], "invalid syntax", ""),
    ],
)
def test_what_is_wrong_is_named_with_the_file_and_the_mend(
    write: Write, lines: list[str], fault: str, mend: str
) -> None:
    (objection,) = registry.read(write(*lines)).objections
    assert objection.startswith("suites/things/test_thing.py: ")
    assert fault in objection
    assert mend in objection


def test_a_stage_that_no_workflow_runs_is_refused(write: Write) -> None:
    known = {
        name: stages.Stage(name=name, title=name, minutes=5, workflow=workflow)
        for name, workflow in (("cpu", "ci"), ("idle", ""), ("gone", "no-such-template"))
    }
    for name in ("idle", "gone"):
        root = write(f'suite(seconds=2, stage="{name}", needs="cpu")')
        assert registry.read(root, known).objections == (
            f"suites/things/test_thing.py: stage={name!r}: no workflow runs it; choose from cpu",
        )


def run_pytest(root: Path, *arguments: str) -> tuple[int, str]:
    """In a process of its own, which knows that repository and no other."""
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{ROOT}"}
    own = ["suites/", "--rootdir=.", "--confcutdir=.", "-p", "no:cacheprovider", "-p", "no:draftproof"]
    command = [sys.executable, "-m", "pytest", *own, *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def repository(write: Write) -> Path:
    """What collection needs, and two suites of one passing test each: things, and others that take longer."""
    test = "\n\ndef test_it() -> None:\n    pass\n"
    root = write(GOOD, test)
    shutil.copytree(ROOT / "ci", root / "ci", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "suites" / "perf").mkdir()
    for name in ("__init__.py", "conftest.py", "registration.py", "perf/__init__.py"):
        shutil.copy(registry.SUITES / name, root / "suites" / name)
    other = root / "suites" / "test_other.py"
    other.write_text(f'{registry.IMPORT}\nsuite(seconds=9, stage="cpu", needs="cpu"){test}', encoding="utf-8")
    return root


def test_collection_fails_and_names_every_file_that_is_not_registered_as_it_must_be(repository: Path) -> None:
    for name, line in {
        "test_new": "",
        "test_tpu": 'suite(seconds=2, stage="cpu", needs="tpu")',
        "test_idle": 'suite(seconds=2, stage="weekly", needs="cpu")',
    }.items():
        test = f"{registry.IMPORT}\n\n{line}\n\n\ndef test_it() -> None:\n    pass\n"
        (repository / "suites" / f"{name}.py").write_text(test, encoding="utf-8")
    code, said = run_pytest(repository)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert f"suites/test_new.py: is not registered; add after its imports `{registry.IMPORT}`" in said
    assert "suites/test_tpu.py: needs='tpu': ci/runners.toml has no such class; choose from cpu" in said
    assert "suites/test_idle.py: stage='weekly': ci/stages.toml has no such stage; choose from cpu" in said
    assert "passed" not in said


@pytest.mark.parametrize(
    ("shard", "workers", "ran"),
    [("1/2", "0", "suites/test_other.py::test_it"), ("2/2", "1", "suites/things/test_thing.py::test_it")],
)
def test_a_shard_runs_its_files_and_no_others(repository: Path, shard: str, workers: str, ran: str) -> None:
    code, said = run_pytest(repository, "--stage", "cpu", "--shard", shard, "-n", workers, "-v")
    assert code == 0, said
    assert ran in said
    assert "1 passed" in said


@pytest.mark.parametrize("part", ["3/2", "0/2", "1", "a/b", "/", "-1/2"])
def test_a_shard_that_there_is_not_is_refused(registrations: tuple[registry.Registration, ...], part: str) -> None:
    with pytest.raises(ValueError, match="write K/N with 1 <= K <= N, such as 2/3"):
        shards.shard(registrations, stages.load(), "cpu", "cpu", part)
