"""Figures that are counted: the same on every machine, and after every run. `python -m ci.perf.counted` gives them.

Of each drafter lane on each checkpoint, per generated token or for a whole run; of each kernel, for one call.
"""

from __future__ import annotations

import argparse
import gc
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ci.gpu_cases import CASES
from ci.perf import checkpoints, engines, trees
from ci.perf.workloads import KERNEL_SIZES
from kernels import KERNELS

BATCH, TOKENS = 4, 24
COPIES = {
    "copy_": 1,
    "_to_copy": None,
    "clone": None,
    "cat": None,
    "stack": None,
    "gather": None,
    "index": None,
    "index_select": None,
    "index_put_": 2,
    "_index_put_impl_": 2,
    "index_copy_": 3,
    "scatter_": 3,
    "repeat": None,
    "repeat_interleave": None,
    "take_along_dim": None,
}
"""Operators that move rows from one place to another, and which argument they move; None: what they return."""
DIGITS = 6
"""Decimals of a figure that is a quotient."""


@dataclass
class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """What torch does while it is entered. `operators`: calls that reach the dispatcher. `copied_bytes`: what COPIES
    moved. `peak_bytes`: most that was held at once, of memory that was taken meanwhile. `host_reads`: values that the
    host waited for, one by one."""

    operators: int = 0
    copied_bytes: int = 0
    peak_bytes: int = 0
    host_reads: int = 0
    _held: int = 0
    _seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        self.operators += 1
        self.host_reads += name in ("_local_scalar_dense", "item")
        if name in COPIES:
            place = COPIES[name]
            self.copied_bytes += sum(map(_nbytes, tree_leaves(result if place is None else args[place])))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in self._seen:
            return
        self._seen.add(address)
        self._held += size
        self.peak_bytes = max(self.peak_bytes, self._held)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self._held -= size


def _nbytes(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


@dataclass(slots=True)
class Calls:
    """Calls of kernels, and passes through the target: seen from outside, whatever the engine counts itself."""

    kernels: int = 0
    target: int = 0


@contextmanager
def calls_in(engine: Any) -> Iterator[Calls]:
    """What is called in this thread meanwhile."""
    launchers = {KERNELS[name].call.__code__ for name in KERNELS}
    forward: CodeType = type(engine.target).forward.__code__
    calls = Calls()

    def look(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        if frame.f_code in launchers:
            calls.kernels += 1
        elif frame.f_code is forward and frame.f_locals["self"] is engine.target:
            calls.target += 1

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def of_engine(checkpoint: Path, lane: str) -> dict[str, float]:
    """Figures of one batch of greedy requests, the second that the engine runs."""
    engine = engines.start(checkpoint, lane, BATCH)
    engines.generate(engine, BATCH, TOKENS)
    drafter, stats = engine.drafter, engine.processor.stats
    forwards = drafter.num_forwards if drafter else 0
    drafts, accepted = stats.num_drafts, stats.num_accepted_tokens
    tokens = steps = most = 0
    gc.collect()
    with Tally() as tally, calls_in(engine) as calls:
        for step in engines.steps(engine, BATCH, TOKENS):
            tokens += sum(len(output.token_ids) for output in step.outputs)
            steps += 1
            most = max(most, _held_pages(engine))
    figures: dict[str, float] = {
        "target_forwards_per_token": calls.target / tokens,
        "kernel_launches_per_step": calls.kernels / steps,
        "operators_per_step": tally.operators / steps,
        "host_reads_per_step": tally.host_reads / steps,
        "copied_bytes_per_token": tally.copied_bytes / tokens,
        "peak_bytes": tally.peak_bytes,
        "pages_at_peak": most,
        "pages_at_idle": _held_pages(engine),
    }
    if drafter is not None:
        figures["draft_forwards_per_token"] = (drafter.num_forwards - forwards) / tokens
    if stats.num_drafts > drafts:
        figures["accept_length"] = 1 + (stats.num_accepted_tokens - accepted) / (stats.num_drafts - drafts)
    return figures


def _held_pages(engine: Any) -> int:
    """Pages that are neither free nor kept for their contents alone."""
    allocator = engine.allocator
    return int(allocator.num_pages - len(allocator.free_pages()) - len(allocator.cached_pages()))


def of_kernel(name: str) -> dict[str, float]:
    """Figures of one call of a kernel's torch reference."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        given = CASES[name].build(KERNEL_SIZES, torch.device("cpu"))
    with Tally() as tally:
        KERNELS[name].call(*given.args, **given.kwargs, backend="torch")
    return {"operators": tally.operators, "copied_bytes": tally.copied_bytes, "peak_bytes": tally.peak_bytes}


def count(folders: Mapping[str, Path], only: Sequence[str] = ()) -> dict[str, float]:
    """Every figure, under engine/CHECKPOINT/LANE/FIGURE and kernel/NAME/FIGURE, or those that lie below `only`."""

    def wanted(place: str) -> bool:
        return not only or place in only

    found: dict[str, float] = {}
    for checkpoint, folder in folders.items():
        for lane in checkpoints.CHECKPOINTS[checkpoint].lanes:
            place = f"engine/{checkpoint}/{lane}"
            if wanted(place):
                found |= _under(place, of_engine(folder, lane))
    for name in CASES:
        place = f"kernel/{name}"
        if wanted(place):
            found |= _under(place, of_kernel(name))
    return found


def _under(place: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{place}/{name}": round(value, DIGITS) for name, value in figures.items()}


def main() -> None:
    """Count in the source at ROOT, which may be another than this one."""
    parser = argparse.ArgumentParser(prog="python -m ci.perf.counted")
    for name in ("root", "checkpoints", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--only", action="append", default=[])
    asked = parser.parse_args()
    tree = trees.load(asked.root)
    # Cycles are collected when so many objects were made, wherever they were: peaks would depend on it.
    gc.disable()
    with tree.active():
        folders = {path.name: path for path in asked.checkpoints.iterdir()}
        figures = tree.modules[trees.COUNTING].count(folders, asked.only)
    asked.out.write_bytes(msgspec.json.encode(figures))


if __name__ == "__main__":
    main()
