"""The scorecard: one cell for each (engine, drafter, invariant), and no cell silently empty."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.report.places import write_whole

Status = Literal["pass", "fail", "refused", "error"]
_WORST_FIRST: tuple[Status, ...] = ("error", "fail", "pass", "refused")
NO_TEST_RAN = "no test ran"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one test said about the invariants that it is marked with. `seconds` is its wall time, set-up included."""

    engine: str
    drafter: str
    invariants: tuple[str, ...]
    status: Status
    nodeid: str
    examples: int
    seconds: float
    message: str = ""
    reproduce: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Outcome:
        return cls(**{**raw, "invariants": tuple(raw["invariants"])})


@dataclass(slots=True)
class Cell:
    """All tests of one invariant on one drafter of one engine.

    `status` is the worst of its tests; a cell is `refused` only when no test could run. `examples` counts what was
    really executed: hypothesis examples, the points of a sweep, else one per test.
    """

    engine: str
    drafter: str
    invariant: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def status(self) -> Status:
        found = {outcome.status for outcome in self.outcomes}
        return next((status for status in _WORST_FIRST if status in found), "error")

    @property
    def examples(self) -> int:
        return sum(outcome.examples for outcome in self.outcomes)

    @property
    def seconds(self) -> float:
        return sum(outcome.seconds for outcome in self.outcomes)

    @property
    def message(self) -> str:
        """Why the cell has its status: the first message of the worst tests, or that no test ran."""
        if not self.outcomes:
            return NO_TEST_RAN
        return next((outcome.message for outcome in self.outcomes if outcome.status == self.status), "")

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "drafter": self.drafter,
            "invariant": self.invariant,
            "status": self.status,
            "tests": len(self.outcomes),
            "examples": self.examples,
            "seconds": round(self.seconds, 3),
            "message": self.message,
            "refused": sum(outcome.status == "refused" for outcome in self.outcomes),
            "failures": [
                {"nodeid": outcome.nodeid, "message": outcome.message, "reproduce": outcome.reproduce}
                for outcome in self.outcomes
                if outcome.status in ("fail", "error")
            ],
        }


@dataclass(slots=True)
class Scorecard:
    """Cells by (engine, drafter, invariant). `expect` first, then `add` what ran, in any order. `versions` of engines,
    as far as they are known. `part`: which part of a whole run this is, empty for all of it."""

    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    part: str = ""

    def expect(self, engine: str, drafter: str, invariants: Iterable[str]) -> None:
        """Declare cells that must not stay empty."""
        for invariant in invariants:
            self._cell(engine, drafter, invariant)

    def order(self, drafters: Sequence[str]) -> None:
        """Put the cells into the order of the drafters, then of the invariants."""

        def place(key: tuple[str, str, str]) -> tuple[str, int, str]:
            engine, drafter, invariant = key
            return engine, drafters.index(drafter) if drafter in drafters else len(drafters), invariant

        self.cells = {key: self.cells[key] for key in sorted(self.cells, key=place)}

    def narrow(self, invariants: Collection[str]) -> None:
        """Leave out the cells of other invariants, if there are any that were asked for: a test that was run for one of
        these goes into all cells that it asks for, and fills the others in part. What is red stays."""
        if invariants:
            self.cells = {
                key: cell
                for key, cell in self.cells.items()
                if cell.invariant in invariants or cell.status in ("fail", "error")
            }

    def add(self, outcome: Outcome) -> None:
        for invariant in outcome.invariants:
            self._cell(outcome.engine, outcome.drafter, invariant).outcomes.append(outcome)

    def _cell(self, engine: str, drafter: str, invariant: str) -> Cell:
        return self.cells.setdefault((engine, drafter, invariant), Cell(engine, drafter, invariant))

    @property
    def ok(self) -> bool:
        return all(cell.status in ("pass", "refused") for cell in self.cells.values())

    @property
    def empty(self) -> list[Cell]:
        return [cell for cell in self.cells.values() if not cell.outcomes]

    def write(self, path: Path) -> None:
        """Write a JSON list of cells, sorted by engine, drafter and invariant."""
        rows = [
            {**self.cells[key].to_json(), "version": self.versions.get(key[0], ""), "part": self.part}
            for key in sorted(self.cells)
        ]
        write_whole(path, json.dumps(rows, indent=1) + "\n")
