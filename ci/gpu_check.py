"""The checks that need a GPU, in one go, within a deadline: run by gpu_check.sh, which lists the exit codes.

Steps, each cut off by what is left of the deadline: the kernels' property tests, compiled; the reference engine on CUDA
against itself on the CPU; a benchmark of every kernel. Everything goes into one JSON, also what was not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED, NO_GPU, DEADLINE = 0, 1, 3, 4
STEPS = ("tests", "engine", "bench")
RESERVE = 5.0
"""Seconds that are kept for writing the report."""


@dataclass(slots=True)
class Step:
    """`status` is passed, failed, deadline (cut off) or not run. `seconds` it took; `detail` is what it said last."""

    name: str
    status: str = "not run"
    seconds: float = 0.0
    detail: str = ""


@dataclass(slots=True)
class Report:
    """Bytes are those that a kernel has to read and write at least; `copy_bytes_per_s` counts both sides of a copy."""

    machine: dict[str, str]
    steps: list[Step] = field(default_factory=list)
    copy_bytes_per_s: float | None = None
    benchmarks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        statuses = {step.status for step in self.steps}
        if "failed" in statuses:
            return FAILED
        return PASSED if statuses <= {"passed"} else DEADLINE


class Deadline:
    """Seconds from now; `left` less the reserve for the report."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        return self._end - RESERVE - self._clock()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Checks and benchmarks on one NVIDIA GPU.")
    parser.add_argument("--deadline", type=float, default=290.0, help="seconds for everything (default 290)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check.json", help="where the JSON goes")
    parser.add_argument("--only", choices=STEPS, action="append", help="only this step; repeatable")
    parser.add_argument("--kernel", action="append", help="benchmark only this kernel; repeatable")
    options = parser.parse_args(arguments)
    if options.deadline <= RESERVE:
        parser.error(f"--deadline={options.deadline:g}: must be more than {RESERVE:g} seconds")
    deadline = Deadline(options.deadline)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked", file=sys.stderr)  # noqa: T201
        return NO_GPU
    report = Report(machine=describe_machine())
    runs = {
        "tests": lambda: run_child(["-m", "pytest", "-q", "suites/kernels", *UNCOMPILED], deadline.left()),
        "engine": lambda: run_child(["-m", "ci.gpu_engine"], deadline.left()),
        "bench": lambda: run_bench(report, deadline, options.kernel),
    }
    run_steps(report, {name: run for name, run in runs.items() if name in (options.only or STEPS)}, deadline)
    write(report, options.out)
    return report.exit_code


UNCOMPILED = ["--ignore=suites/kernels/test_compile.py", "--ignore=suites/kernels/test_gpu_check.py"]
"""Tests of this folder that say nothing about a GPU."""


def describe_machine() -> dict[str, str]:
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "memory_bytes": str(torch.cuda.get_device_properties(0).total_memory),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def run_steps(report: Report, runs: dict[str, Callable[[], tuple[str, str]]], deadline: Deadline) -> None:
    """Each run answers (status, detail). One that starts after the deadline is not run; one that raises has failed."""
    for name, run in runs.items():
        step = Step(name)
        report.steps.append(step)
        if deadline.left() <= 0:
            continue
        started = time.monotonic()
        try:
            step.status, step.detail = run()
        except Exception as error:  # the other steps, and the report, are still worth having
            step.status, step.detail = "failed", f"{type(error).__name__}: {error}"
        step.seconds = round(time.monotonic() - started, 1)


def run_child(arguments: list[str], timeout: float) -> tuple[str, str]:
    """A step of its own process: it cannot take the others' CUDA context with it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return "deadline", f"cut off after {timeout:.0f} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode == 0:
        return "passed", lines[-1] if lines else ""
    return "failed", "\n".join(lines[-40:])


def run_bench(report: Report, deadline: Deadline, kernels: list[str] | None) -> tuple[str, str]:
    import torch

    from ci.gpu_bench import bench, cuda_timer, measure_copy

    device = torch.device("cuda")
    report.copy_bytes_per_s = measure_copy(device, cuda_timer)
    return bench(report.benchmarks, report.copy_bytes_per_s, device, cuda_timer, deadline.left, kernels)


def write(report: Report, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(asdict(report) | {"exit_code": report.exit_code}, indent=1) + "\n")
    print(table(report))  # noqa: T201
    print(f"report: {out}")  # noqa: T201


def table(report: Report) -> str:
    """The steps, and each kernel at the size at which it moves most bytes."""
    lines = [
        f"{step.name:8} {step.status:9} {step.seconds:6.1f} s  {(step.detail.splitlines() or [''])[-1]}"
        for step in report.steps
    ]
    largest: dict[str, dict[str, Any]] = {}
    for entry in report.benchmarks:
        if entry["bytes"] >= largest.get(entry["kernel"], {"bytes": -1})["bytes"]:
            largest[entry["kernel"]] = entry
    if largest:
        size, figures = f"{'kernel':24} {'batch':>5} {'k':>2} {'vocab':>6}", f"{'us':>9} {'GB/s':>7} {'of copy':>7}"
        lines += ["", f"{size} {figures} {'torch/triton':>12}"]
    for entry in largest.values():
        size = f"{entry['kernel']:24} {entry['batch']:5} {entry['k']:2} {entry['vocab']:6}"
        if entry["seconds"] is None:
            lines.append(f"{size}  {entry['error']}")
            continue
        ratio = "-" if entry["ratio"] is None else f"{entry['ratio']:.2f}"
        speed = f"{entry['bytes_per_s'] / 1e9:7.1f} {entry['of_copy']:7.2f}"
        lines.append(f"{size} {entry['seconds'] * 1e6:9.1f} {speed} {ratio:>12}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
