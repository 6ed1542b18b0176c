"""The scorecard as a terminal table: invariants down, drafters across, 80 columns at most; how lists are printed."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.report.scorecard import Cell, Scorecard

_WIDTH = 80
_STYLES = {"pass": "green", "fail": "bold red", "error": "bold red", "refused": "yellow"}


def render(scorecard: Scorecard, *, colour: bool) -> str:
    """One table per engine, then a line for each cell that is not a plain pass. Plain text unless `colour`."""
    console = Console(
        file=StringIO(), width=_WIDTH, force_terminal=colour, color_system="standard" if colour else None, emoji=False
    )
    for engine in sorted({cell.engine for cell in scorecard.cells.values()}):
        cells = [cell for cell in scorecard.cells.values() if cell.engine == engine]
        console.print(f"engine {engine}: examples that passed", style="bold")
        for drafters in _panels(cells):
            console.print(_table(cells, drafters))
    for cell in scorecard.cells.values():
        if cell.status != "pass":
            console.print(_line(cell), soft_wrap=False, overflow="ellipsis", no_wrap=True)
    console.print(_summary(scorecard))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def show(table: Table) -> None:
    """Print it: as wide as the terminal, or with a line for each row where there is none."""
    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    text = StringIO()
    # A measure is bounded by the width that it is taken in.
    wide = Console(file=text, width=10_000, color_system=None)
    wide.width = max(1, wide.measure(table).maximum)
    wide.print(table)
    for line in text.getvalue().splitlines():
        typer.echo(line.rstrip())


def _panels(cells: Sequence[Cell]) -> list[list[str]]:
    """The drafters, in as many tables as it takes to keep their names whole."""
    room = _WIDTH - max(len(cell.invariant) for cell in cells)
    panels: list[list[str]] = [[]]
    for drafter in dict.fromkeys(cell.drafter for cell in cells):
        if sum(_width(name) for name in (*panels[-1], drafter)) > room:
            panels.append([])
        panels[-1].append(drafter)
    return panels


def _width(drafter: str) -> int:
    """Of its column: the name or the longest mark, and the space before it."""
    return max(len(drafter), len("refused")) + 1


def _table(cells: Sequence[Cell], drafters: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("invariant", no_wrap=True)
    for drafter in drafters:
        table.add_column(drafter, justify="right", overflow="fold")
    for invariant in sorted({cell.invariant for cell in cells}):
        row = {cell.drafter: cell for cell in cells if cell.invariant == invariant}
        table.add_row(invariant, *(_mark(row.get(drafter)) for drafter in drafters))
    return table


def _mark(cell: Cell | None) -> Text:
    if cell is None:
        return Text("-", style="dim")
    label = str(cell.examples) if cell.status == "pass" else cell.status
    if cell.status in ("fail", "error"):
        label = label.upper()
    return Text(label, style=_STYLES[cell.status])


def _line(cell: Cell) -> Text:
    first = cell.message.strip().splitlines()[0] if cell.message.strip() else ""
    text = Text(f"{cell.status} ", style=_STYLES[cell.status])
    return text.append(f"{cell.invariant} {cell.drafter}: {first}", style="")


def _summary(scorecard: Scorecard) -> Text:
    cells = scorecard.cells.values()
    counts = {status: sum(cell.status == status for cell in cells) for status in _STYLES}
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    examples = sum(cell.examples for cell in cells)
    return Text(f"{plural(len(cells), 'cell')}: {', '.join(parts) or 'none'}; {examples} examples")
