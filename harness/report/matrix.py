"""The matrix drafter x feature as a page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.workloads.features import FEATURES
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.matrix import Cell, row

Rows = Mapping[str, Mapping[str, Cell]]
"""Lane -> feature -> cell."""


def run(engine: str, names: Sequence[str] = ()) -> Rows:
    """Ask the engine for every feature on each lane. Raises ValueError for a lane that there is not."""
    for name in names:
        if name not in LANES:
            raise ValueError(f"--drafter {name}: there is none of that name; choose from {', '.join(LANES)}")
    with TemporaryDirectory() as root:
        return {name: row(Lane(engine, LANES[name], Path(root))) for name in names or LANES}


def page(engine: str, rows: Rows) -> str:
    """Features down, drafters across; the reasons of refusals below."""
    lanes = list(rows)
    reasons: dict[str, int] = {}
    lines = [f"| feature | {' | '.join(lanes)} |", f"| --- |{' --- |' * len(lanes)}"]
    for feature in FEATURES:
        cells = [_mark(rows[lane][feature], reasons) for lane in lanes]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    counts = [cell.status for cells in rows.values() for cell in cells.values()]
    head = [
        f"# Drafter x feature: {engine}",
        "",
        "Written by `draftproof matrix`. Every cell was asked for beside a plain neighbour: it passes when the engine",
        "heeded it and every invariant held, or the engine refused it, before anything ran, for the reason below.",
        "",
        f"{len(counts)} cells: {counts.count('pass')} pass, {counts.count('refused')} refused, "
        f"{counts.count('fail')} fail.",
        "",
    ]
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*head, *lines, *(["", "## Reasons", ""] if notes else []), *notes]) + "\n"


def _mark(cell: Cell, reasons: dict[str, int]) -> str:
    if cell.status == "pass":
        return "pass"
    number = reasons.setdefault(cell.why, len(reasons) + 1)
    return f"{'FAIL' if cell.status == 'fail' else cell.status} ({number})"
