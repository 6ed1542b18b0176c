"""Scorecards of several engines, or of several versions of one, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.report.places import write_whole

_WIDTH = 80


def merged(parts: Mapping[str, Path], into: Path) -> list[dict[str, Any]]:
    """The cells of one scorecard per engine, written as one. An engine without a file has none."""
    cells = [cell for path in parts.values() if path.is_file() for cell in json.loads(path.read_text(encoding="utf-8"))]
    write_whole(into, json.dumps(cells, indent=1) + "\n")
    return cells


def differences(cells: Sequence[Mapping[str, Any]], engines: Sequence[str]) -> str:
    """A table of the cells that do not have one status on all engines, and why where one is red."""
    by_place: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for cell in cells:
        by_place.setdefault((cell["drafter"], cell["invariant"]), {})[cell["engine"]] = cell
    table = Table("drafter", "invariant", *engines, box=box.SIMPLE_HEAD, pad_edge=False)
    reasons = []
    for (drafter, invariant), found in by_place.items():
        told = [str(found[engine]["status"]) if engine in found else "-" for engine in engines]
        if len(set(told)) == 1:
            continue
        table.add_row(drafter, invariant, *told)
        reasons += [
            f"{invariant} {drafter} {engine}: {_first_line(cell)}"
            for engine, cell in found.items()
            if cell["status"] in ("fail", "error")
        ]
    console = Console(file=StringIO(), width=_WIDTH, emoji=False)
    if table.row_count:
        console.print(table)
        for reason in reasons:
            console.print(reason, overflow="ellipsis", no_wrap=True, markup=False)
    else:
        console.print(f"{' and '.join(engines)}: no cell differs")
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def _first_line(cell: Mapping[str, Any]) -> str:
    return next(iter(str(cell["message"]).strip().splitlines()), "")
