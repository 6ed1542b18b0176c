"""Timings of two source trees that take turns, in a process of its own: `python -m ci.perf.timed`.

A block imports both trees afresh, in an order that a coin decides, so that neither keeps a lucky place in memory. In
it each benchmark runs several times on both trees at once: a slice of one (a step of the engine, say), the same slice
of the other, again in random order. If the two are the same source, base and head are names that the coin gave:
whatever drifts or is noisy, the difference is as likely to favour one as the other. That symmetry is all that the
gate's test relies on.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from ci.perf import trees
from ci.perf.trees import Tree

Side = Literal["base", "head"]
SIDES: tuple[Side, Side] = ("base", "head")
WARM_UPS = 2
DIGITS = 7
"""Decimals of a second that are kept."""
DONE = object()
PATIENCE = 120.0
"""Seconds in which a block must be done."""

Work = Callable[[], Iterator[object]]


class Pair(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of each slice of the work in each tree, by the clock of the thread's CPU time and by the wall's."""

    base_cpu: list[float]
    head_cpu: list[float]
    base_wall: list[float]
    head_wall: list[float]


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs by benchmark, in the order in which they were taken. `seconds`: how long all of it took."""

    pairs: dict[str, list[Pair]]
    seconds: float = 0.0


class Recording(msgspec.Struct, kw_only=True):
    """`failures`: why a benchmark could not be measured, by name."""

    seed: int
    failures: dict[str, str] = {}
    blocks: list[Block] = []


def read(path: Path) -> Recording:
    """Raises ValueError naming the file that is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Recording)
    except (msgspec.MsgspecError, OSError) as error:
        raise ValueError(f"{path}: is no recording of timings: {error}") from error


class Session:
    """Both trees, block after block."""

    def __init__(self, roots: dict[Side, Path], checkpoints: Path, seed: int, only: Sequence[str] = ()) -> None:
        self.roots = roots
        self.checkpoints = {path.name: path for path in checkpoints.iterdir()}
        self.random = random.Random(seed)
        self.only = set(only)
        self.recording = Recording(seed=seed)

    def block(self, pairs: int) -> Block:
        started = time.monotonic()
        loaded: dict[Side, tuple[Tree, dict[str, Work]]] = {}
        for side in self._either_order():
            loaded[side] = self._prepared(side)
        names = [name for name in loaded["base"][1] if name in loaded["head"][1]]
        taken: dict[str, list[Pair]] = {name: [] for name in names}
        # A collection in the middle of a sample would be charged to whoever runs then.
        gc.collect()
        gc.disable()
        for _ in range(pairs):
            for name in self.random.sample(names, len(names)):
                taken[name].append(self._pair(name, loaded))
        gc.enable()
        return Block(pairs=taken, seconds=time.monotonic() - started)

    def _either_order(self) -> tuple[Side, Side]:
        return SIDES if self.random.random() < 0.5 else (SIDES[1], SIDES[0])

    def _prepared(self, side: Side) -> tuple[Tree, dict[str, Work]]:
        tree = trees.load(self.roots[side])
        works: dict[str, Work] = {}
        with tree.active():
            for name, benchmark in tree.definitions.BENCHMARKS.items():
                if (self.only and name not in self.only) or name in self.recording.failures:
                    continue
                try:
                    works[name] = benchmark.prepare(self.checkpoints)
                    for _ in range(WARM_UPS):
                        deque(works[name](), maxlen=0)
                except Exception as error:  # whatever a source does wrong must not end the session
                    works.pop(name, None)
                    self.recording.failures[name] = f"{side}: {type(error).__name__}: {error}"
        return tree, works

    def _pair(self, name: str, loaded: dict[Side, tuple[Tree, dict[str, Work]]]) -> Pair:
        running = {side: (tree, works[name]()) for side, (tree, works) in loaded.items()}
        cpu: dict[Side, list[float]] = {side: [] for side in SIDES}
        wall: dict[Side, list[float]] = {side: [] for side in SIDES}
        while running:
            for side in self._either_order():
                if side not in running:
                    continue
                tree, slices = running[side]
                tree.take_over()
                wall_before, cpu_before = time.perf_counter(), time.thread_time()
                more = next(slices, DONE) is not DONE
                cpu[side].append(round(time.thread_time() - cpu_before, DIGITS))
                wall[side].append(round(time.perf_counter() - wall_before, DIGITS))
                if not more:
                    del running[side]
        return Pair(cpu["base"], cpu["head"], wall["base"], wall["head"])


def environment() -> dict[str, str]:
    """Of a process that measures: one thread, and what is imported as `ci` is this checkout's."""
    paths = os.pathsep.join(filter(None, [str(trees.ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONHASHSEED": "0"}


def record(
    base: Path,
    head: Path,
    checkpoints: Path,
    folder: Path,
    *,
    blocks: int,
    pairs: int,
    only: Sequence[str] = (),
    on_block: Callable[[int], None] = lambda _: None,
) -> Recording:
    """Run a session in a process of its own; its recording stays in `folder`. Raises ValueError with the process's last
    line when it fails, or does not keep to PATIENCE."""
    seed = random.SystemRandom().getrandbits(32)
    out = folder / f"timings-{seed:08x}.json"
    command = [sys.executable, "-m", "ci.perf.timed", str(base), str(head), str(checkpoints), str(out)]
    command += [f"--blocks={blocks}", f"--pairs={pairs}", f"--seed={seed}", *(f"--only={name}" for name in only)]
    errors = folder / f"timings-{seed:08x}.log"
    started = time.monotonic()
    with (
        errors.open("w", encoding="utf-8") as log,
        subprocess.Popen(command, cwd=trees.ROOT, env=environment(), stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        for number, _ in enumerate(process.stdout, start=1):
            on_block(number)
            if time.monotonic() - started > PATIENCE * number:
                process.kill()
                raise ValueError(f"timings: {number} blocks took over {PATIENCE:.0f} s each; ask for fewer --pairs")
    if process.returncode != 0:
        said = errors.read_text(encoding="utf-8").strip().splitlines() or ["nothing was said"]
        raise ValueError(f"timings: the process ended with code {process.returncode}: {said[-1]}")
    return read(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """One line on stdout for each block that is done."""
    parser = argparse.ArgumentParser(prog="python -m ci.perf.timed")
    for name in ("base", "head", "checkpoints", "out"):
        parser.add_argument(name, type=Path)
    for name in ("blocks", "pairs", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--only", action="append", default=[])
    asked = parser.parse_args(arguments)
    session = Session({"base": asked.base, "head": asked.head}, asked.checkpoints, asked.seed, asked.only)
    for block in islice(_blocks(session, asked.pairs), asked.blocks):
        session.recording.blocks.append(block)
        sys.stdout.write(f"{len(session.recording.blocks)}\n")
        sys.stdout.flush()
    asked.out.write_bytes(msgspec.json.encode(session.recording))


def _blocks(session: Session, pairs: int) -> Iterator[Block]:
    while True:
        yield session.block(pairs)


if __name__ == "__main__":
    main()
