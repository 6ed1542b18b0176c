"""Cells that do not have one status in all runs or versions that the report holds."""

from __future__ import annotations

from dataclasses import dataclass

from harness.report.page.base import Panel, render
from harness.report.page.inputs import Inputs
from harness.report.page.scorecards import Place, layout
from harness.report.table import plural


@dataclass(frozen=True, slots=True)
class Difference:
    """`places` in the order of the cards; None where a card has no such cell."""

    drafter: str
    invariant: str
    places: tuple[Place | None, ...]

    @property
    def everywhere(self) -> bool:
        return None not in self.places

    @property
    def red(self) -> bool:
        return any(place is not None and place.cell.red for place in self.places)

    @property
    def reasons(self) -> list[str]:
        lines = (place.cell.headline for place in self.places if place is not None and place.cell.status != "pass")
        return list(dict.fromkeys(lines))


def differences(inputs: Inputs) -> tuple[list[Difference], int]:
    """(cells that differ, those that every card has first and of them the red; how many are the same on all)."""
    found: dict[tuple[str, str], list[Place | None]] = {}
    for number, grid in enumerate(layout(inputs)):
        for row in grid.rows.values():
            for place in row.values():
                key = place.cell.drafter, place.cell.invariant
                found.setdefault(key, [None] * len(inputs.cards))[number] = place
    all_ = [Difference(*key, tuple(places)) for key, places in found.items()]
    told = [one for one in all_ if len({p.cell.status if p is not None else None for p in one.places}) > 1]
    return sorted(told, key=lambda one: (not one.everywhere, not one.red)), len(all_) - len(told)


def panel(inputs: Inputs) -> Panel | None:
    if len(inputs.cards) < 2:
        return None
    told, same = differences(inputs)
    both = [one for one in told if one.everywhere]
    alone = [one for one in told if not one.everywhere]
    names = [card.name for card in inputs.cards]
    return Panel(
        id="differences",
        title="Differences",
        lead=f"{plural(len(both), 'cell')} changed between {len(names)} scorecards, {plural(same, 'cell')} the same; "
        f"{plural(len(alone), 'cell')} not in all of them.",
        body=render("differences.html", both=both, alone=alone, names=names),
    )
