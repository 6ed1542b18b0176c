"""Drafter x invariant for each engine and version; every cell that is no plain pass leads to what was seen there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.invariants import INVARIANTS
from harness.report.findings import Finding
from harness.report.page.base import SYMBOLS, Panel, distinct, render
from harness.report.page.forms import Cell
from harness.report.page.inputs import Card, Inputs
from harness.report.table import plural
from harness.workloads.lanes import AT_THE_DOOR, LANES

SHOWN = 8
"""Failures of one cell that are told in full; the others are named."""

STATUSES = ("pass", "fail", "error", "refused")


@dataclass(frozen=True, slots=True)
class Told:
    """One red test: the words of its check, and the commands that show it again."""

    nodeid: str
    message: str
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A cell where it lies on the page. `explained`: the findings that tell why it is red."""

    cell: Cell
    anchor: str
    statement: str
    explained: tuple[Finding, ...]
    told: tuple[Told, ...]
    more: tuple[str, ...]

    @property
    def label(self) -> str:
        cell = self.cell
        if cell.status == "pass":
            return str(cell.examples)
        return str(len(cell.failures)) if cell.failures else cell.status


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A card, laid out."""

    card: Card
    anchor: str
    drafters: list[str]
    rows: Mapping[str, Mapping[str, Place]]
    red: list[Place]
    refused: Mapping[str, list[Place]]
    verdict: str
    line: str


def panel(inputs: Inputs) -> Panel | None:
    grids = layout(inputs)
    if not grids:
        return None
    cells = [cell for card in inputs.cards for cell in card.cells]
    return Panel(
        id="scorecards",
        title="Scorecards",
        lead="A cell counts the examples that passed, or its red tests; whatever is not a pass leads to what was seen.",
        body=render(
            "scorecards.html",
            grids=grids,
            drafters=_in_order(cell.drafter for cell in cells),
            invariants=sorted({cell.invariant for cell in cells}),
            statuses=[status for status in STATUSES if any(cell.status == status for cell in cells)],
        ),
    )


def layout(inputs: Inputs) -> list[Grid]:
    """The cards in the order in which they were given."""
    return [_grid(card, f"card-{number}", inputs.findings) for number, card in enumerate(inputs.cards)]


def _grid(card: Card, anchor: str, findings: Sequence[Finding]) -> Grid:
    engine = card.engine.partition("@")[0]
    known = [one for one in findings if one.engine == engine and _version(card) in one.versions]
    places = [_place(cell, f"{anchor}-{number}", known) for number, cell in enumerate(card.cells)]
    rows: dict[str, dict[str, Place]] = {name: {} for name in sorted({cell.invariant for cell in card.cells})}
    for place in places:
        rows[place.cell.invariant][place.cell.drafter] = place
    refused: dict[str, list[Place]] = {}
    for place in places:
        if place.cell.status == "refused":
            refused.setdefault(place.cell.message.removeprefix("refused: ").strip(), []).append(place)
    verdict, line = summary(card, sum(bool(place.explained) for place in places if place.cell.red))
    return Grid(
        card=card,
        anchor=anchor,
        drafters=_in_order(cell.drafter for cell in card.cells),
        rows=rows,
        red=[place for place in places if place.cell.red],
        refused=refused,
        verdict=verdict,
        line=line,
    )


def summary(card: Card, explained: int = 0) -> tuple[str, str]:
    """(status of the whole card, what it came to in one line)."""
    counts = Counter(str(cell.status) for cell in card.cells)
    red = counts["fail"] + counts["error"]
    verdict = "fail" if red else "pass" if counts["pass"] else "refused"
    parts = [f"{SYMBOLS[status]} {counts[status]} {status}" for status in STATUSES if counts[status]]
    known = f", {explained} of the red explained" if explained else ""
    examples = sum(cell.examples for cell in card.cells)
    seconds = sum(cell.seconds for cell in card.cells)
    told = f"{plural(len(card.cells), 'cell')}: {', '.join(parts)}{known}; {examples} examples, {seconds:.0f} s"
    return verdict, "; ".join([told, *(f"a part of a run: {part}" for part in distinct(_parts(card)))])


def _parts(card: Card) -> list[str]:
    return [cell.part for cell in card.cells if cell.part]


def _version(card: Card) -> str:
    return card.version or card.engine.partition("@")[2]


def _place(cell: Cell, anchor: str, known: Sequence[Finding]) -> Place:
    told = tuple(_told(failure.nodeid, failure.message, failure.reproduce) for failure in cell.failures[:SHOWN])
    if cell.red and not told:
        told = (Told("", cell.message, ()),)
    statement = AT_THE_DOOR.get(cell.invariant, "")
    if cell.invariant in INVARIANTS:
        statement = INVARIANTS[cell.invariant].statement
    return Place(
        cell=cell,
        anchor=anchor,
        statement=statement,
        explained=tuple(one for one in known if cell.red and one.explains(cell.drafter, cell.invariant)),
        told=told,
        more=tuple(failure.nodeid for failure in cell.failures[SHOWN:]),
    )


def _told(nodeid: str, message: str, command: str) -> Told:
    """A check ends its message with its reproducers, a line each."""
    words, mark, tail = message.partition("\nreproduce: ")
    commands = tail.splitlines() if mark else []
    return Told(nodeid, words.strip(), tuple(distinct([command, *commands] if command else commands)))


def _in_order(drafters: Iterable[str]) -> list[str]:
    """In the order of the lanes, then as they come."""
    named = distinct(drafters)
    return sorted(named, key=lambda name: list(LANES).index(name) if name in LANES else len(LANES))
