"""`draftproof ci register-runner` end to end: the command in a process of its own, an API on loopback that keeps state,
and a program in the place of the runner that leaves processes behind."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from ci.github import GitHub, GitHubError, Scope
from ci.register_runner import Plan, child_environment, run, start_program
from ci.registration import record_of
from suites.ci.fake_github import FakeGitHub, serving
from suites.ci.fake_runner import NVIDIA_SMI, FakeRunner, script
from suites.registration import suite
from suites.tiers import FULL, tiered

suite(seconds=13, stage="cpu", needs="cpu")

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "ghp_0123456789abcdefghijklmnopqrstuvwxyz"
COMMAND = [sys.executable, "-c", "from suites.ci.command import main; main()", "register-runner"]
NAME = "box-1"
PATIENCE = 120.0
"""Seconds; the machine may have other work."""


@pytest.fixture
def fake() -> Iterator[FakeGitHub]:
    with serving(TOKEN) as server:
        yield server


@dataclass(frozen=True)
class Done:
    code: int
    output: str


@dataclass
class Machine:
    """Where the command runs: its folder, and what it finds in its environment."""

    home: Path
    url: str
    environment: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, runner: FakeRunner, *more: str) -> subprocess.Popen[str]:
        arguments = ["--runner-dir", str(runner.folder), "--repo", "octo/engine", "--api-url", self.url]
        arguments += ["--name", NAME, "--label", "draftproof-1-gpu", "--grace", "0.2", *more]
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, runner: FakeRunner, *more: str) -> Done:
        return finished(self.start(runner, *more))

    def run_here(self, runner: FakeRunner) -> Done:
        """In this process, which spares the start of another; what a job leaves behind is not seen here."""
        plan = plan_of(runner.folder)
        told: list[str] = []
        github = GitHub(self.url, lambda: TOKEN, pause=0.01)
        try:
            code = run(plan, github, TOKEN, told.append)
        except (GitHubError, ValueError) as error:
            code = 1
            told.append(str(error))
        finally:
            github.close()
        return Done(code, "\n".join(told))


def plan_of(folder: Path, user: str = "") -> Plan:
    return Plan(
        scope=Scope("octo", "engine"),
        group="Default",
        name=NAME,
        labels=("self-hosted",),
        runner_dir=folder,
        work_folder="_work",
        user=user,
        pass_env=(),
        grace=0.2,
        gpu_wait=0.5,
    )


def finished(process: subprocess.Popen[str]) -> Done:
    output, _ = process.communicate(timeout=PATIENCE)
    return Done(process.returncode, output)


@pytest.fixture
def machine(tmp_path: Path, fake: FakeGitHub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".local"))
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    inherited = {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(tmp_path / ".local"),
        "AWS_SECRET_ACCESS_KEY": "other-secret",
    }
    machine = Machine(tmp_path, fake.url, {**inherited, "GITHUB_TOKEN": TOKEN})
    yield machine
    for process in machine.started:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def process_list() -> str:
    """Arguments and environments of all processes, save of this one, which made the token up."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        for kind in ("cmdline", "environ"):
            try:
                found.append(Path(f"/proc/{process.pid}/{kind}").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return "\n".join(found)


def files(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_one_job_and_nothing_is_left_and_nobody_saw_the_token(machine: Machine, fake: FakeGitHub) -> None:
    # Of this test alone: others may be starting with theirs at the same time.
    fake.token = machine.environment["GITHUB_TOKEN"] = f"ghp_{secrets.token_hex(20)}"
    runner = FakeRunner.make(machine.home / "runner", fake.url, NAME, wait=True, deaf=True)
    process = machine.start(runner, "--pass-env", "GITHUB_TOKEN")
    until((runner.folder / "seen.json").exists)
    seen, listed = runner.seen, process_list()
    assert len(running(seen["left"])) == 2
    os.kill(seen["pid"], signal.SIGKILL)
    done = finished(process)

    (registered,) = fake.registered_ever
    assert registered["labels"] == ["self-hosted", "draftproof-1-gpu"]
    assert registered["work_folder"] == f"_work/{NAME}"
    assert not fake.runners
    assert seen["arguments"] == []
    assert seen["session"] == seen["pid"]
    assert not running(seen["left"])
    assert not (runner.folder / "_work" / NAME).exists()
    assert "ended what the job left running" in done.output
    assert "no GPU: nvidia-smi is not installed" in done.output
    assert "Listening for Jobs" in done.output

    for text in (done.output, listed, json.dumps(seen["environment"]), files(machine.home)):
        assert fake.token not in text
    assert seen["jit"] not in done.output
    assert "other-secret" not in json.dumps(seen["environment"])
    assert "jit-credential" not in files(machine.home / ".local")


def test_a_token_in_a_file_is_read_again_for_every_request(machine: Machine, fake: FakeGitHub) -> None:
    runner = FakeRunner.make(machine.home / "runner", fake.url, NAME, job=False, wait=True)
    file = machine.home / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    del machine.environment["GITHUB_TOKEN"]
    process = machine.start(runner, "--token-file", str(file))
    until((runner.folder / "seen.json").exists)
    fake.token = "ghs_the-next-one"
    file.write_text(fake.token)
    process.send_signal(signal.SIGTERM)
    done = finished(process)
    assert done.code == 128 + signal.SIGTERM
    assert not fake.runners
    assert TOKEN not in done.output
    assert TOKEN not in json.dumps(runner.seen["environment"])


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=FULL)])
def test_a_signal_before_the_answer_leaves_no_runner_registered(
    machine: Machine, fake: FakeGitHub, number: signal.Signals
) -> None:
    """The answer that would give its id never comes."""
    runner = FakeRunner.make(machine.home / "runner", fake.url, NAME)
    asked, stopped = threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        stopped.wait(PATIENCE)

    fake.plan("POST .*jitconfig", 0, carry_out=True, before_answer=wait)
    process = machine.start(runner)
    assert asked.wait(PATIENCE)
    assert len(fake.runners) == 1
    process.send_signal(number)
    done = finished(process)
    stopped.set()
    assert done.code == 128 + number
    assert "still registered and has been removed" in done.output
    assert not fake.runners
    assert not (runner.folder / "seen.json").exists()


def test_what_a_killed_process_left_is_cleaned_up_by_the_next(machine: Machine, fake: FakeGitHub) -> None:
    runner = FakeRunner.make(machine.home / "runner", fake.url, NAME, job=False, wait=True)
    killed = machine.start(runner)
    until((runner.folder / "seen.json").exists)
    killed.kill()
    finished_killed = killed.wait(PATIENCE)
    assert finished_killed == -signal.SIGKILL
    assert len(fake.runners) == 1
    before = runner.seen

    refused = machine.run(runner)
    assert "still runs as process" in refused.output
    assert refused.code != 0
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: not running([before["pid"]]))

    (runner.folder / "seen.json").unlink()
    (runner.folder / "how.json").write_text(json.dumps({**runner.how, "wait": False, "job": True, "work": "_work/2"}))
    done = machine.run(runner, "--name", "box-2")
    assert done.code == 0, done.output
    assert f"runner {NAME}, left over from a start that was cut off, has been removed" in done.output
    assert not fake.runners
    assert not running(before["left"][:1])
    psutil.Process(before["left"][1]).kill()  # without parent and environment, nothing tells whose it was


def test_two_runners_do_not_share_a_folder(machine: Machine, fake: FakeGitHub) -> None:
    runner = FakeRunner.make(machine.home / "runner", fake.url, NAME)
    with record_of(runner.folder):
        done = machine.run_here(runner)
    assert "another runner uses it" in done.output
    assert not fake.asked


@pytest.mark.parametrize("broken", ["a program that does not start", "an answer that means nothing"])
def test_a_failure_after_registration_removes_the_runner(machine: Machine, fake: FakeGitHub, broken: str) -> None:
    runner = FakeRunner.make(machine.home / "runner", fake.url, NAME)
    if broken == "a program that does not start":
        (runner.folder / "run.sh").write_text("#!/no/such/interpreter\n")
    else:
        fake.plan("POST .*jitconfig", 201, b"<html>", carry_out=True)
    done = machine.run_here(runner)
    assert done.code != 0
    assert {"a program that does not start": "could not be started", "an answer that means nothing": "GitHub sends"}[
        broken
    ] in done.output
    assert len(fake.registered_ever) == 1
    assert not fake.runners


def test_a_runner_that_ends_without_a_job_is_removed(machine: Machine, fake: FakeGitHub) -> None:
    runner = FakeRunner.make(machine.home / "runner", fake.url, NAME, exit=3)
    done = machine.run_here(runner)
    assert done.code == 1
    assert "ended with exit code 3" in done.output
    assert "was still registered and has been removed" in done.output
    assert not fake.runners


def test_what_ran_before_the_job_is_not_its_own(machine: Machine, fake: FakeGitHub) -> None:
    with subprocess.Popen(["sleep", "600"]) as before:
        done = machine.run_here(FakeRunner.make(machine.home / "runner", fake.url, NAME, exit=0))
        assert done.code == 0, done.output
        assert before.poll() is None
        before.kill()


def test_a_taken_name_is_told_and_its_runner_stays(machine: Machine, fake: FakeGitHub) -> None:
    fake.runners[5] = {"id": 5, "name": NAME}
    done = machine.run_here(FakeRunner.make(machine.home / "runner", fake.url, NAME))
    assert done.code == 1
    assert "choose another --name" in done.output
    fake.runners.clear()
    other = {6: {"id": 6, "name": NAME}}
    fake.plan("POST .*jitconfig", 409, {"message": "Already exists"}, before_answer=lambda: fake.runners.update(other))
    done = machine.run_here(FakeRunner.make(machine.home / "second", fake.url, NAME))
    assert "choose another --name" in done.output
    assert list(fake.runners) == [6]


def test_an_error_of_the_api_ends_in_one_sentence(machine: Machine, fake: FakeGitHub) -> None:
    fake.token = "ghp_another"
    done = machine.run(FakeRunner.make(machine.home / "runner", fake.url, NAME))
    assert done.code == 1
    (line,) = done.output.splitlines()
    assert line.startswith("error: could not list the runners of repository octo/engine: GitHub does not accept")
    assert "Traceback" not in done.output
    assert TOKEN not in done.output


@pytest.mark.parametrize("stays", tiered([False, True], True))
def test_gpu_memory_must_come_back(machine: Machine, fake: FakeGitHub, stays: bool) -> None:
    """A neighbour's memory is not the job's."""
    script(machine.home / "nvidia-smi", NVIDIA_SMI)
    runner = FakeRunner.make(machine.home / "runner", fake.url, NAME, gpu_mib=2000, gpu_stays=stays)
    done = machine.run(runner, "--gpu-wait", "0.5")
    if stays:
        assert "GPU-0 holds 2000 MiB more than before the job" in done.output
    else:
        assert "GPU memory came back" in done.output
    assert done.code == int(stays), done.output


def test_a_gpu_that_does_not_answer_is_told(
    machine: Machine, fake: FakeGitHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(machine.home / "nvidia-smi", NVIDIA_SMI)
    monkeypatch.setenv("PATH", machine.environment["PATH"])
    (machine.home / "broken").touch()
    done = machine.run_here(FakeRunner.make(machine.home / "runner", fake.url, NAME, exit=0))
    assert "GPU memory is not watched: nvidia-smi failed: NVIDIA-SMI has failed" in done.output
    assert done.code == 0


def test_only_root_starts_a_runner_as_another_user_and_it_does() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        token = folder / "token"
        token.touch(mode=0o600)
        if os.geteuid() != 0:
            with pytest.raises(ValueError, match="only root"):
                child_environment(plan_of(folder, "nobody"), os.environ, TOKEN)
            return
        environment = child_environment(plan_of(folder, "nobody"), os.environ, TOKEN)
        (folder / "run.sh").write_text(f"#!/bin/sh\nid -u > {folder}/by\ncat {token} 2> /dev/null && exit 1\nexit 0\n")
        (folder / "run.sh").chmod(0o755)
        (folder / "by").touch()
        (folder / "by").chmod(0o666)
        assert start_program(plan_of(folder, "nobody"), environment).wait(PATIENCE) == 0
        assert int((folder / "by").read_text()) == pwd.getpwnam("nobody").pw_uid
        assert environment["HOME"] == pwd.getpwnam("nobody").pw_dir


def test_a_dry_run_prints_the_request_and_sends_nothing(machine: Machine, fake: FakeGitHub) -> None:
    del machine.environment["GITHUB_TOKEN"]
    done = machine.run(FakeRunner.make(machine.home / "runner", fake.url, NAME), "--dry-run")
    assert json.loads(done.output) == {
        "method": "POST",
        "url": f"{fake.url}/repos/octo/engine/actions/runners/generate-jitconfig",
        "body": {
            "name": NAME,
            "runner_group_id": 1,
            "labels": ["self-hosted", "draftproof-1-gpu"],
            "work_folder": f"_work/{NAME}",
        },
    }
    assert not fake.asked
