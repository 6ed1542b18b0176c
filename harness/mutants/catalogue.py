"""docs/bug-catalogue.md as data: the historical bugs that mutants stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bug-catalogue.md"
_COLUMNS = 10


@dataclass(frozen=True, slots=True)
class Bug:
    """One row. `threads`: public issue or pull request, owner/name#number. `shows`: L loud, W silently wrong, P right
    output and spoilt acceptance, memory or speed."""

    id: str
    engine: str
    threads: str
    symptom: str
    cause: str
    bug_class: str
    drafters: str
    shows: str


@cache
def bugs() -> dict[str, Bug]:
    """Every entry by id, in the order of the page."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == _COLUMNS and re.fullmatch(r"B\d{3}", cells[0]):
            names = (field.name for field in fields(Bug))
            found[cells[0]] = Bug(**dict(zip(names, [*cells[:7], cells[8]], strict=True)))
    return found


def bug(bug_id: str) -> Bug:
    """Raises ValueError when there is none of that id."""
    if bug_id not in bugs():
        raise ValueError(f"{bug_id}: docs/bug-catalogue.md has no such entry")
    return bugs()[bug_id]
