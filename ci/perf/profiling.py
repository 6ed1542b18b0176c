"""Where the time of the reference engine goes."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from ci.perf import engines
from ci.perf.checkpoints import CHECKPOINTS


def tables(checkpoint: str, lane: str, batch: int, tokens: int, top: int) -> Group:
    """Python functions by their own time, and torch's operators by theirs, of the same batch. Raises ValueError for a
    checkpoint or lane that there is not."""
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"--checkpoint {checkpoint}: must be one of {', '.join(CHECKPOINTS)}")
    chosen = CHECKPOINTS[checkpoint]
    if lane not in chosen.lanes:
        raise ValueError(f"--lane {lane}: {checkpoint} has {', '.join(chosen.lanes)}")
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        engine = engines.start(chosen.write(Path(folder)), lane, batch)

        def run() -> None:
            engines.generate(engine, batch, tokens)

        run()
        return Group(_functions(run, top), "", _operators(run, top))


def _functions(run: Callable[[], None], top: int) -> Table:
    profiler = cProfile.Profile()
    profiler.runcall(run)
    stats: Any = pstats.Stats(profiler)
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])
    table = Table("Python function", "calls", "own time", box=None, pad_edge=False)
    for (file, line, name), (_, calls, own, _, _) in rows[:top]:
        place = f"{Path(file).parent.name}/{Path(file).name}:{line} {name}" if line else name
        table.add_row(place, str(calls), f"{100 * own / stats.total_tt:.1f} %")
    return table


def _operators(run: Callable[[], None], top: int) -> Table:
    with torch_profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    table = Table("operator", "calls", "own time", box=None, pad_edge=False)
    for event in events[:top]:
        table.add_row(event.key, str(event.count), f"{100 * event.self_cpu_time_total / total:.1f} %")
    return table
