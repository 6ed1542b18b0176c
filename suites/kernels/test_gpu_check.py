"""What of the GPU check can run without one: steps, deadline, report, and every benchmark's arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ci import gpu_bench, gpu_check
from ci.gpu_cases import CASES
from kernels import KERNELS
from suites.kernels.guard import DEVICE
from suites.registration import suite

suite(seconds=3.2, stage="cpu", needs="cpu")

SCRIPT = Path(gpu_check.__file__).with_suffix(".sh")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def call_once(call: object) -> float:
    """Not a time, but a call that has to work."""
    assert callable(call)
    call()
    return 1e-3


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "BATCHES_AND_KS", ((2, 2),))
    monkeypatch.setattr(gpu_bench, "VOCABS", (64,))
    monkeypatch.setattr(gpu_bench, "HIDDEN", 32)
    monkeypatch.setattr(gpu_bench, "CONTEXT", 352)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == gpu_check.NO_GPU
    assert capsys.readouterr().err == "no CUDA device here: nothing was checked\n"


def test_the_script_hands_its_options_on() -> None:
    done = subprocess.run(
        ["sh", str(SCRIPT), "--deadline", "1"],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--deadline=1: must be more than 5 seconds" in done.stderr


def test_every_kernel_has_a_benchmark() -> None:
    assert set(CASES) == set(KERNELS)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", CASES)
def test_arguments_of_a_benchmark_are_accepted(name: str) -> None:
    (sizes,) = gpu_bench.sizes_of(name)
    entry = gpu_bench.measure_entry(name, sizes, 1e12, DEVICE, call_once)
    assert entry["error"] is None
    assert entry["bytes"] > 0
    assert entry["ratio"] == 1.0


def test_a_deadline_thins_the_sizes_not_the_kernels() -> None:
    work = gpu_bench.plan(KERNELS)
    assert [name for name, _ in work[: len(KERNELS)]] == list(KERNELS)
    assert len(set(work)) == len(work)
    batches = {sizes.batch for _, sizes in work}
    assert (min(batches), max(batches)) == (1, 256)


@pytest.mark.usefixtures("small")
def test_the_deadline_ends_the_benchmark() -> None:
    left = iter([3.0, 2.0, 0.0])
    entries: list[dict[str, object]] = []
    status, detail = gpu_bench.bench(entries, 1e12, DEVICE, call_once, lambda: next(left))
    assert (status, len(entries)) == ("deadline", 2)
    assert detail.startswith("2 of ")


def test_refuses_a_kernel_that_has_no_benchmark() -> None:
    with pytest.raises(ValueError, match="no_such_kernel"):
        gpu_bench.bench([], 1e12, DEVICE, call_once, lambda: 1.0, ["no_such_kernel"])


def test_steps_after_the_deadline_are_not_run() -> None:
    clock = Clock()
    deadline = gpu_check.Deadline(20.0, clock)

    def slow() -> tuple[str, str]:
        clock.now = 16.0
        return "passed", "done"

    report = gpu_check.Report(machine={})
    gpu_check.run_steps(report, {"tests": slow, "engine": slow}, deadline)
    assert [step.status for step in report.steps] == ["passed", "not run"]
    assert report.exit_code == gpu_check.DEADLINE


def test_a_step_that_breaks_fails_and_the_others_still_run() -> None:
    def broken() -> tuple[str, str]:
        raise RuntimeError("no kernel image")

    report = gpu_check.Report(machine={})
    gpu_check.run_steps(report, {"tests": broken, "engine": lambda: ("passed", "")}, gpu_check.Deadline(100.0))
    assert [step.status for step in report.steps] == ["failed", "passed"]
    assert "no kernel image" in report.steps[0].detail
    assert report.exit_code == gpu_check.FAILED


@pytest.mark.parametrize(
    ("code", "timeout", "expected"),
    [
        ("print('3 passed')", 30.0, ("passed", "3 passed")),
        ("import sys; print('why'); sys.exit(1)", 30.0, ("failed", "why")),
        ("import time; time.sleep(30)", 0.5, ("deadline", "cut off after 0 s")),
    ],
)
def test_a_step_of_its_own_process(code: str, timeout: float, expected: tuple[str, str]) -> None:
    assert gpu_check.run_child(["-c", code], timeout) == expected


def test_report_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = gpu_check.Report(machine={"gpu": "none"}, copy_bytes_per_s=1e12)
    report.steps.append(gpu_check.Step("tests", "passed", 1.5, "41 passed"))
    common = {"kernel": "topn_gather", "batch": 4, "k": 2, "vocab": 64, "error": None}
    figures = {"seconds": 1e-3, "bytes_per_s": 5e8, "of_copy": 0.0005, "torch_seconds": 2e-3, "ratio": 2.0}
    report.benchmarks += [{**common, "bytes": 10, **figures}, {**common, "batch": 8, "bytes": 500_000, **figures}]
    failed = dict.fromkeys(figures)
    report.benchmarks.append({**common, "kernel": "build_tree", "bytes": 1, **failed, "error": "out of memory"})
    gpu_check.write(report, tmp_path / "deep" / "report.json")
    written = json.loads((tmp_path / "deep" / "report.json").read_text())
    assert written["exit_code"] == gpu_check.PASSED
    assert [entry["batch"] for entry in written["benchmarks"]] == [4, 8, 4]
    printed = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["topn_gather", "8", "2", "64", "1000.0", "0.5", "0.00", "2.00"] for line in printed)
    assert any("build_tree" in line and "out of memory" in line for line in printed)
