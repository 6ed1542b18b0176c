"""What a job left behind: processes that it started, and GPU memory that did not come back."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

PR_SET_CHILD_SUBREAPER = 36
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
ROUNDS = 5
"""A process that is ended may have started another one."""
PATIENCE = 30.0
"""Seconds in which nvidia-smi must answer."""
SLACK_MIB = 128
"""What a driver keeps for itself comes and goes."""
MARK = "DRAFTPROOF_RUNNER"
"""Variable that every process of a job inherits, with the name of its runner."""


def adopt_orphans() -> None:
    """Descendants whose parents end become children of this process, whatever session or environment they made for
    themselves: what a job started stays known."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def marked(runner: str) -> set[psutil.Process]:
    """Processes of an earlier runner whose supervisor is gone."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == runner:
                found.add(process)
        except psutil.Error:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Ended:
    """Processes by `PID name`; command lines may hold secrets and are not told."""

    ended: tuple[str, ...]
    alive: tuple[str, ...]


def end_descendants(spared: Collection[psutil.Process], grace: float = GRACE) -> Ended:
    """End all descendants but `spared`, and those that they start meanwhile."""
    ended: list[str] = []
    alive: set[psutil.Process] = set()
    for _ in range(ROUNDS):
        found = {one for one in descendants() if one not in spared and one not in alive}
        if not found:
            break
        names = {one: _name(one) for one in found if not _is_over(one)}
        alive |= end(found, grace)
        ended += [name for one, name in names.items() if one not in alive]
    return Ended(tuple(sorted(ended)), tuple(sorted(_name(one) for one in alive)))


def end(processes: Iterable[psutil.Process], grace: float = GRACE) -> set[psutil.Process]:
    """SIGTERM, then SIGKILL -> those that live on: of another user, or stuck in the kernel."""
    every = list(processes)
    left = every
    for signal in ("terminate", "kill"):
        for process in left:
            with suppress(psutil.Error):
                getattr(process, signal)()
        end_at = time.monotonic() + grace
        left = [one for one in left if not _is_over(one)]
        while left and time.monotonic() < end_at:
            time.sleep(0.05)
            left = [one for one in left if not _is_over(one)]
    for process in every:
        with suppress(psutil.Error):
            process.wait(0)
    return set(left)


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.name()}"
    except psutil.Error:
        return str(process.pid)


def _is_over(process: psutil.Process) -> bool:
    """A zombie is: who inherited it may never ask for it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """MiB in use by GPU, and of that what processes answer for."""

    used: Mapping[str, int]
    accounted: Mapping[str, int]

    def unaccounted(self, gpu: str) -> int:
        return self.used.get(gpu, 0) - self.accounted.get(gpu, 0)


class NoGpu(Exception):
    """Why no GPU memory can be read."""


def gpu_memory() -> GpuMemory:
    """Raises NoGpu."""
    used = {gpu: _mebibytes(amount) for gpu, amount in _ask("--query-gpu=uuid,memory.used")}
    accounted: Counter[str] = Counter()
    for _, gpu, amount in _ask("--query-compute-apps=pid,gpu_uuid,used_gpu_memory"):
        accounted[gpu] += _mebibytes(amount)
    return GpuMemory(used, accounted)


def _ask(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except FileNotFoundError:
        raise NoGpu("no GPU: nvidia-smi is not installed") from None
    except subprocess.TimeoutExpired:
        raise NoGpu(f"nvidia-smi gave no answer within {PATIENCE:.0f} s: the driver hangs") from None
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoGpu(f"nvidia-smi failed: {lines[0]}")
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _mebibytes(text: str) -> int:
    """Zero for what nvidia-smi cannot tell, as of slices."""
    return int(text) if text.isdigit() else 0


def missing_memory(before: GpuMemory, patience: float) -> list[str]:
    """A sentence for each GPU that holds more than `before` with no process answering for it. Memory of neighbours is
    theirs. `patience`: seconds in which the driver may take it back. Raises NoGpu when no GPU answers any more."""
    end_at = time.monotonic() + patience
    while True:
        now = gpu_memory()
        grown = {gpu: now.unaccounted(gpu) - before.unaccounted(gpu) for gpu in now.used}
        told = [
            f"{gpu} holds {amount} MiB more than before the job, and no process answers for it; look at nvidia-smi, "
            "and reset the GPU or restart the machine before it takes another job"
            for gpu, amount in grown.items()
            if amount > SLACK_MIB
        ]
        if not told or time.monotonic() >= end_at:
            return told
        time.sleep(min(0.5, patience))
