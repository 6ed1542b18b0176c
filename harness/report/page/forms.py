"""The files that a report is made of, as they are read. Fields that are not shown are passed over."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

_COUNT = re.compile(r"\d+ violations? of ")
MOST = 1e100
"""A figure beyond it is nonsense, and could not be drawn."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Status = Literal["pass", "fail", "refused", "error"]


class Failure(msgspec.Struct, frozen=True):
    """A red test of a cell, and the command that runs it again."""

    nodeid: str
    message: str = ""
    reproduce: str = ""


class Cell(msgspec.Struct, frozen=True):
    """An entry of `scorecard.json`. `part`: which part of a whole run was asked for, empty for all of it."""

    engine: str
    drafter: str
    invariant: str
    status: Status
    version: str = ""
    examples: int = 0
    seconds: Seconds = 0.0
    message: str = ""
    part: str = ""
    failures: tuple[Failure, ...] = ()

    @property
    def red(self) -> bool:
        return self.status in ("fail", "error")

    @property
    def headline(self) -> str:
        """The first line that says what is wrong, behind the one that counts violations."""
        lines = self.message.strip().splitlines() or [""]
        line = lines[1] if len(lines) > 1 and _COUNT.match(lines[0]) else lines[0]
        return line.removeprefix(f"{self.invariant}: ").removeprefix("refused: ")


class Kill(msgspec.Struct, frozen=True):
    """`seconds` from the start of the trial."""

    invariant: str
    seconds: Seconds = 0.0
    test: str = ""
    message: str = ""


class Trial(msgspec.Struct, frozen=True):
    lanes: tuple[str, ...] = ()
    kills: tuple[Kill, ...] = ()
    ended: str = ""

    @property
    def red(self) -> frozenset[str]:
        return frozenset(kill.invariant for kill in self.kills)


class Mutant(msgspec.Struct, frozen=True):
    """`red`: what must see it; `may`: what may, too. `time_to_kill` in seconds."""

    id: str
    trial: Trial
    fault: str = ""
    bugs: tuple[str, ...] = ()
    red: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    killed: bool = False
    time_to_kill: Seconds | None = None
    faults: tuple[str, ...] = ()


class Zoo(msgspec.Struct, frozen=True):
    """What `draftproof mutants run --json` writes."""

    mutants: tuple[Mutant, ...]
    controls: tuple[Trial, ...] = ()


class Spread(msgspec.Struct, frozen=True):
    """Seconds per call, over the rounds of a benchmark."""

    min: Seconds
    q1: Seconds
    median: Seconds
    q3: Seconds
    max: Seconds
    rounds: int = 0


class Benchmark(msgspec.Struct, frozen=True):
    name: str
    stats: Spread
    group: str | None = None
    extra_info: Mapping[str, Any] = {}

    def figures(self) -> Iterator[tuple[str, float]]:
        """Every number that the benchmark told beside its time, under the path to it."""
        yield from numbers(self.extra_info)


class Benchmarks(msgspec.Struct, frozen=True):
    """What `pytest --benchmark-json` writes."""

    benchmarks: tuple[Benchmark, ...]
    datetime: str = ""
    machine_info: Mapping[str, Any] = {}
    commit_info: Mapping[str, Any] = {}


def numbers(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Leaves of nested mappings that are numbers, as (path, value)."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        if abs(value) < MOST:
            yield path, float(value)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from numbers(inner, f"{path} / {name}" if path else str(name))
