"""Benchmarks of every kernel at serving sizes: time, bytes a second against a measured copy, ratio to the reference.

A case is a function from sizes to arguments; to add one, put it next to its neighbour in `CASES`, under the kernel's
name. Times are medians of single launches between device events, allocation of outputs included.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ci.gpu_cases import CASES, Arguments, Sizes
from kernels import KERNELS

BATCHES_AND_KS = ((1, 4), (64, 4), (256, 8), (1, 1), (1, 8), (16, 4), (256, 1))
"""In the order in which they are wanted, should the deadline cut some off."""
VOCABS = (32_000, 128_256)
HIDDEN = 4096
CONTEXT = 2048
BUDGET_MS = 15.0
"""How long one measurement repeats its call."""

Timer = Callable[[Callable[[], Any]], float]
"""Seconds that a call takes."""


def cuda_timer(call: Callable[[], Any]) -> float:
    """The first call compiles; then it repeats for BUDGET_MS, three times at least."""
    call()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < BUDGET_MS and len(times) < 200):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch gives no types for it
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) / 1e3


def measure_copy(device: torch.device, timer: Timer, nbytes: int = 1 << 30) -> float:
    """Bytes a second of a device copy, read and written counted both: what a kernel could reach at best."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / timer(lambda: target.copy_(source))


def sizes_of(name: str) -> Iterator[Sizes]:
    """Sizes of one kernel; the vocabulary varies only where it has one."""
    vocabs = VOCABS if CASES[name].uses_vocab else VOCABS[:1]
    for (batch, k), vocab in itertools.product(BATCHES_AND_KS, vocabs):
        yield Sizes(batch=batch, k=k, vocab=vocab, hidden=HIDDEN, context=CONTEXT)


def plan(kernels: Iterable[str]) -> list[tuple[str, Sizes]]:
    """Every kernel's first size before any kernel's second: a deadline then thins the sizes, not the kernels."""
    columns = [[(name, sizes) for sizes in sizes_of(name)] for name in kernels]
    rounds = itertools.zip_longest(*columns)
    return [entry for row in rounds for entry in row if entry is not None]


@dataclass(frozen=True, slots=True)
class _Measured:
    seconds: float | None
    error: str | None = None


def _measure(call: Callable[..., Any], given: Arguments, backend: str, timer: Timer) -> _Measured:
    try:
        return _Measured(timer(lambda: call(*given.args, **given.kwargs, backend=backend)))
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return _Measured(None, "out of memory")


def bench(
    entries: list[dict[str, Any]],
    copy_bytes_per_s: float,
    device: torch.device,
    timer: Timer,
    seconds_left: Callable[[], float],
    kernels: list[str] | None = None,
) -> tuple[str, str]:
    """Append a record for each kernel and size to `entries` until the time is up; answers (status, detail).

    Raises ValueError for a kernel that does not exist or has no case.
    """
    for name in kernels or KERNELS:
        if name not in CASES or name not in KERNELS:
            raise ValueError(f"kernel={name!r}: has no benchmark; there are {', '.join(CASES)}")
    work = plan(kernels or KERNELS)
    failed = 0
    for done, (name, sizes) in enumerate(work):
        if seconds_left() <= 0:
            return "deadline", f"{done} of {len(work)} sizes measured"
        entry = measure_entry(name, sizes, copy_bytes_per_s, device, timer)
        failed += entry["seconds"] is None
        entries.append(entry)
    return ("failed" if failed else "passed"), f"{len(work)} sizes measured, {failed} failed"


def measure_entry(
    name: str, sizes: Sizes, copy_bytes_per_s: float, device: torch.device, timer: Timer
) -> dict[str, Any]:
    case = CASES[name]
    given = case.build(sizes, device)
    call = KERNELS[name].call
    triton, reference = (_measure(call, given, backend, timer) for backend in ("triton", "torch"))
    speed = None if triton.seconds is None else given.nbytes / triton.seconds
    both = triton.seconds is not None and reference.seconds is not None
    return {
        "kernel": name,
        "batch": sizes.batch,
        "k": sizes.k,
        "vocab": sizes.vocab if case.uses_vocab else 0,
        "bytes": given.nbytes,
        "seconds": triton.seconds,
        "bytes_per_s": speed,
        "of_copy": None if speed is None else speed / copy_bytes_per_s,
        "torch_seconds": reference.seconds,
        "ratio": reference.seconds / triton.seconds if both else None,  # type: ignore[operator]  # both are numbers
        "error": triton.error or reference.error,
    }
