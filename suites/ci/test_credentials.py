"""Where the token of register-runner comes from, and where it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.credentials import from_environment, from_file
from ci.github import Scope
from ci.register_runner import Plan, child_environment, labels_of
from ci.runners import RunnerClass, load
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "ghp_0123456789"


def written(folder: Path, text: str = TOKEN, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_its_owner_alone_is_read(tmp_path: Path, mode: int) -> None:
    assert from_file(written(tmp_path, f"{TOKEN}\n", mode)) == TOKEN


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o601])
def test_a_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match=r"mode 06.. lets others in; chmod 600 it") as caught:
        from_file(written(tmp_path, mode=mode))
    assert TOKEN not in str(caught.value)


def test_a_file_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This user is made to be another, since only root could give the file away."""
    path = written(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ValueError, match="belongs to user"):
        from_file(path)


@pytest.mark.parametrize("text", ["", "\n", "two words", f"{TOKEN}\nmore", "tökèn", "x" * 5000])
def test_a_file_without_one_token_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="must hold one token") as caught:
        from_file(written(tmp_path, text))
    assert text.strip() not in str(caught.value) or not text.strip()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="regular file"):
        from_file(tmp_path / "pipe")
    with pytest.raises(ValueError, match="mode 0600"):
        from_file(tmp_path / "nothing")


def test_a_token_of_the_environment_leaves_it_for_children_and_onlookers() -> None:
    code = """
import os, sys
from ci.credentials import from_environment
assert from_environment("GITHUB_TOKEN") == sys.stdin.readline().strip()
sys.stdout.write(open("/proc/self/environ").read() + repr(dict(os.environ)))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BEFORE": "kept-1", "GITHUB_TOKEN": TOKEN, "ZAFTER": "kept-2"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, input=f"{TOKEN}\n", capture_output=True, text=True, check=True)
    assert TOKEN not in done.stdout
    assert done.stdout.count("kept-1") == done.stdout.count("kept-2") == 2


def test_a_job_of_the_same_user_may_not_read_the_memory_of_the_command() -> None:
    code = "import ctypes; from ci.credentials import hide_memory as hide; hide(); print(ctypes.CDLL(None).prctl(3))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"  # PR_GET_DUMPABLE


def test_no_token_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"set GITHUB_TOKEN, or better give --token-file"):
        from_environment("GITHUB_TOKEN")


PLAN = Plan(
    scope=Scope("octo", "engine"),
    group="Default",
    name="box-1",
    labels=("self-hosted",),
    runner_dir=Path("/runner"),
    work_folder="_work",
    user="",
    pass_env=("HF_HOME", "GITHUB_TOKEN"),
    grace=1.0,
    gpu_wait=1.0,
)


def test_a_job_sees_what_it_needs_and_what_was_named() -> None:
    host = {"PATH": "/bin", "https_proxy": "http://proxy", "HF_HOME": "/models", "NVIDIA_API_KEY": "x", "LC_ALL": "C"}
    seen = child_environment(PLAN, {**host, "GITHUB_TOKEN": TOKEN, "RUNNER_TOKEN": "y"}, TOKEN)
    assert set(seen) == {"PATH", "https_proxy", "HF_HOME", "LC_ALL", "DRAFTPROOF_RUNNER", "RUNNER_MANUALLY_TRAP_SIG"}


def test_a_variable_that_holds_the_token_is_refused() -> None:
    with pytest.raises(ValueError, match="HF_HOME holds the token") as caught:
        child_environment(PLAN, {"HF_HOME": f"https://x:{TOKEN}@models"}, TOKEN)
    assert TOKEN not in str(caught.value)


def test_the_labels_are_those_of_all_classes_that_a_machine_satisfies() -> None:
    classes = load()
    hopper: list[RunnerClass] = [classes[name] for name in ("cpu", "1-gpu", "1-gpu-large", "hopper")]
    own = ("draftproof-1-gpu", "draftproof-1-gpu-large", "draftproof-hopper")
    assert labels_of(hopper) == ("self-hosted", "linux", "x64", *own)
    assert labels_of(hopper, ["1-gpu"]) == ("self-hosted", "linux", "x64", "draftproof-1-gpu")
    with pytest.raises(ValueError, match=r"no self-hosted class.*ci doctor"):
        labels_of([classes["cpu"]])
