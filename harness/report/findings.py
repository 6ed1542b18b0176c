"""Red cells that are explained: a released engine is wrong, and somebody has found out why. A run then fails on what is
not explained, and on what is explained and not red any more."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.engines.environments import ROOT

FILE = ROOT / "ci" / "findings.toml"
ANY = "*"
SERVED = "openai@"


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault or difference of an engine, told in docs/findings.md under the same `id`.

    `engine`: by its name, or `openai@NAME` for what shows only where NAME is served over HTTP. `cells`: invariants by
    drafter lane, `*` for every lane. `sometimes`: it does not show in every run, such as memory that was never written.
    `shown_by`: tests, as `test_file.py::test[LANE-...]`, that show it and so run whosever turn it is (`rotation`).
    """

    id: str
    engine: str
    versions: tuple[str, ...]
    kind: Literal["fault", "by design", "not supported"]
    title: str
    cells: Mapping[str, tuple[str, ...]]
    sometimes: bool = False
    shown_by: tuple[str, ...] = ()

    def explains(self, drafter: str, invariant: str) -> bool:
        return invariant in (*self.cells.get(drafter, ()), *self.cells.get(ANY, ()))


class _File(msgspec.Struct, forbid_unknown_fields=True):
    finding: tuple[Finding, ...]


def read(path: Path = FILE) -> tuple[Finding, ...]:
    """Raises ValueError naming what does not fit."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).finding
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error


def known_of(findings: Iterable[Finding], engine: str) -> list[Finding]:
    """Findings that can explain what an engine shows: its own, and those of what it is a server of."""
    names = (_bare(engine), engine.split("@")[1] if engine.startswith(SERVED) else None)
    return [one for one in findings if one.engine in names]


def _bare(engine: str) -> str:
    """NAME of NAME@VERSION and NAME@PATH; `openai@NAME` of a server, whatever follows."""
    return "@".join(engine.split("@")[: 2 if engine.startswith(SERVED) else 1])


def objections(cells: Iterable[Mapping[str, Any]], findings: Sequence[Finding], engine: str, version: str) -> list[str]:
    """What is wrong with a scorecard of `engine`, given as it was asked for, in that version, beside what is known: red
    cells that no finding explains, empty ones, and findings of its own none of whose cells is red although some ran.
    Not all that an engine shows from inside can be seen over HTTP."""
    known = [one for one in known_of(findings, engine) if version in one.versions]
    told, red, ran = [], set(), set()
    for cell in cells:
        drafter, invariant, status = cell["drafter"], cell["invariant"], cell["status"]
        mine = [one.id for one in known if one.explains(drafter, invariant)]
        if status in ("pass", "fail"):
            ran.update(mine)
        if status == "fail":
            red.update(mine)
        if status == "error" or (status == "fail" and not mine):
            first = next(iter(str(cell["message"]).strip().splitlines()), "")
            told.append(f"{invariant} {drafter}: {status} and not explained: {first}")
    told += [
        f"{one.id}: {one.title}: no cell shows it any more; was it mended? Then take it out of {FILE.name}"
        for one in known
        if one.id in ran - red and one.engine == _bare(engine) and not one.sometimes
    ]
    return told
