"""What a mutant is: a fault that a real engine had, as an edit of our own engine's source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
Smoke = Literal["right", "wrong", "raises"]
"""What one request alone, without flags, shows of a fault: mostly nothing."""


class BadMutant(ValueError):
    """A mutant that cannot be made: its edit does not fit the source any more, or it names what there is not."""


@dataclass(frozen=True, slots=True)
class Edit:
    """In the source of `module` (dotted name) the text `old`, which occurs there exactly once, becomes `new`."""

    module: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault.

    `bugs`: entries of docs/bug-catalogue.md that it stands for. `lanes`: drafter lanes on which it is live; it runs on
    the first, with --all-lanes on each. `live`: what else must be the case, in words. `red`: invariants each of which
    must turn red. `may`: invariants that see the consequences and may turn red with them; any other that turns red is a
    wrong kill. `smoke`: what a single request, batch 1, no flags, shows. `suites`: where the checks are that see it.
    """

    id: str
    fault: str
    bugs: tuple[str, ...]
    lanes: tuple[str, ...]
    red: tuple[str, ...]
    edits: tuple[Edit, ...]
    may: tuple[str, ...] = ()
    live: str = ""
    smoke: Smoke = "right"
    suites: tuple[str, ...] = ("suites/conformance",)

    @property
    def expected(self) -> frozenset[str]:
        return frozenset(self.red + self.may)


def source_of(module: str) -> Path:
    """The file of one of our modules. Nothing is imported to find it: what was imported cannot be edited any more."""
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    raise BadMutant(f"module={module!r}: there is none of that name; an edit names a module by its dotted name")


def edited_sources(edits: Sequence[Edit]) -> dict[str, str]:
    """The source of each edited module, after its edits in their order."""
    sources: dict[str, str] = {}
    for edit in edits:
        text = sources.get(edit.module) or source_of(edit.module).read_text(encoding="utf-8")
        count = text.count(edit.old)
        if count != 1:
            mend = "make `old` the text as it stands in the source, long enough to occur once"
            raise BadMutant(f"old={edit.old!r} occurs {count} times in {edit.module}: {mend}")
        sources[edit.module] = text.replace(edit.old, edit.new)
    return sources
