"""Estimates made true: `seconds=` of each registration, rewritten from measured times."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from ci.registry import ROOT, Registration

KEPT = 1.25
"""An estimate within this factor of what was measured stays: runs differ by as much."""
WORTH_A_LINE = 2.0
"""One that is off by this factor is reported."""
SMALL = 0.5
"""Seconds by which an estimate may be wrong in any case: no plan depends on them."""


@dataclass(frozen=True, slots=True)
class Change:
    """An estimate and what was measured instead, in seconds."""

    registration: Registration
    measured: float

    @property
    def factor(self) -> float:
        """How wrong the estimate is, in either direction; 1 at least."""
        return max(self.measured / self.registration.seconds, self.registration.seconds / max(self.measured, 0.01))

    @property
    def reported(self) -> bool:
        return self.factor > WORTH_A_LINE

    def __str__(self) -> str:
        one = self.registration
        return f"{one.path}: {one.seconds:g} s were estimated for stage {one.stage!r}, {self.measured:.2f} s measured"


def measured(files: Iterable[Path], root: Path = ROOT) -> dict[str, float]:
    """Seconds of each test file, set-up included, from JUnit files (of all shards together) or JSON objects that map
    files to seconds. A test that is in several counts once, as its longest. Raises ValueError naming the file."""
    tests: dict[tuple[str, str], float] = {}
    seconds: dict[str, float] = {}
    for file in files:
        try:
            if file.suffix == ".json":
                seconds |= {str(path): float(value) for path, value in json.loads(file.read_bytes()).items()}
            else:
                for case in ElementTree.parse(file).iter("testcase"):
                    key = (case.get("classname", ""), case.get("name", ""))
                    tests[key] = max(tests.get(key, 0.0), float(case.get("time", 0)))
        except (OSError, ElementTree.ParseError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: is neither JUnit XML nor a JSON object of seconds by file: {error}") from error
    for (module, _), took in tests.items():
        path = _file(module, root)
        if path:
            seconds[path] = seconds.get(path, 0.0) + took
    return seconds


def _file(module: str, root: Path) -> str:
    """The test file of a JUnit class name, which is its module, or a class in it; empty when there is none."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        path = Path(*parts[:end]).with_suffix(".py")
        if (root / path).is_file():
            return path.as_posix()
    return ""


def changes(registrations: Sequence[Registration], seconds: Mapping[str, float], stage: str) -> list[Change]:
    """The estimates of a stage that are to be rewritten."""
    found = [Change(one, seconds[one.path]) for one in registrations if one.stage == stage and one.path in seconds]
    return [
        change
        for change in found
        if change.factor > KEPT and abs(change.measured - change.registration.seconds) > SMALL
    ]


def rewrite(found: Iterable[Change], root: Path = ROOT) -> None:
    """Put the measured seconds into the files, and touch nothing else in them."""
    for change in found:
        path = root / change.registration.path
        lines = path.read_bytes().splitlines(keepends=True)
        node = change.registration.node
        assert node.end_col_offset is not None
        line = lines[node.lineno - 1]
        number = literal(change.measured).encode()
        lines[node.lineno - 1] = line[: node.col_offset] + number + line[node.end_col_offset :]
        path.write_bytes(b"".join(lines))


def literal(seconds: float) -> str:
    """Two digits that count, a tenth at least."""
    return f"{max(round(seconds, 1), 0.1):g}" if seconds < 10 else f"{seconds:.0f}"
