"""What a report is made of, found in files and folders and recognised by content."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

import msgspec

from harness.record.schema import TRACE
from harness.report.findings import Finding
from harness.report.findings import read as findings_of
from harness.report.page.forms import Benchmarks, Cell, Zoo, numbers
from harness.report.page.recordings import Recording, recording
from harness.report.table import plural

T = TypeVar("T")

FORMS = (
    "a scorecard.json, a folder with a recorded run, the JSON of `draftproof mutants run`, of "
    "`pytest --benchmark-json` or of ci/baselines, or a junit.xml"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One engine in one version. `name` tells it from every other card of the report."""

    name: str
    engine: str
    version: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of one commit on one class of runners, by their name."""

    runner: str
    date: str
    commit: str
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FileTime:
    """A test file: seconds of its tests, set-up included, and how many there were."""

    file: str
    seconds: float
    tests: int


@dataclass(frozen=True, slots=True)
class Session:
    """The test files of one junit.xml, called after where it lay."""

    label: str
    files: tuple[FileTime, ...]


@dataclass(slots=True, kw_only=True)
class Inputs:
    """All that was read; `sources` says from where, a line each. `findings` explain red cells."""

    cards: list[Card] = field(default_factory=list)
    recordings: list[Recording] = field(default_factory=list)
    zoos: list[Zoo] = field(default_factory=list)
    benchmarks: list[Benchmarks] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    findings: Sequence[Finding] = ()


class Unrecognised(ValueError):
    """A file that is whole, but none of the forms."""


def read(paths: Iterable[Path], family: str = "", tell: Callable[[Path], None] = lambda _: None) -> Inputs:
    """Everything in the files and folders. Raises ValueError naming a file that is missing, cut or none of the forms;
    in a folder, files of other forms are passed over. `tell` hears of each file before it is read."""
    found = Inputs(findings=findings_of())
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: there is no such file or folder; give {FORMS}")
        if path.is_file():
            tell(path)
            _take(path, found, family)
            continue
        before = len(found.sources)
        for file in _candidates(path):
            tell(file)
            try:
                _take(file, found, family)
            except Unrecognised:
                continue
        if len(found.sources) == before:
            raise ValueError(f"{path}: nothing in this folder belongs into a report; give {FORMS}")
    return found


def _candidates(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (path.name == TRACE or path.suffix in (".json", ".xml")):
            yield path


def _take(path: Path, found: Inputs, family: str) -> None:
    if path.name == TRACE:
        found.recordings.append(recording(path.parent, path.parent.name, family))
        found.sources.append(f"{_shown(path.parent)}: recorded run of {found.recordings[-1].lane}")
    elif path.read_bytes()[:200].lstrip().startswith(b"<"):
        files = _junit(path)
        found.sessions.append(Session(_shown(path), files))
        found.sources.append(f"{_shown(path)}: times of {plural(len(files), 'test file')}")
    else:
        found.sources.append(f"{_shown(path)}: {_json(path, found)}")


def _shown(path: Path) -> str:
    """Relative to where we are, where it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _json(path: Path, found: Inputs) -> str:
    try:
        # Not msgspec's: messages may hold lone surrogates, which the scorecard writes as escapes.
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: not a whole file of JSON ({error}); was it cut, or is it still being written?"
        ) from error
    head = value[0] if isinstance(value, list) and value else value
    keys = set(head) if isinstance(head, dict) else set()
    if {"engine", "drafter", "invariant", "status"} <= keys:
        cells = _converted(path, value, tuple[Cell, ...], "a scorecard")
        _deal(path, cells, found)
        return f"scorecard of {plural(len(cells), 'cell')}"
    if {"mutants", "controls"} <= keys:
        found.zoos.append(_converted(path, value, Zoo, "a kill matrix"))
        return f"kill matrix of {plural(len(found.zoos[-1].mutants), 'mutant')}"
    if {"benchmarks", "machine_info"} <= keys:
        found.benchmarks.append(_converted(path, value, Benchmarks, "benchmark results"))
        return plural(len(found.benchmarks[-1].benchmarks), "benchmark")
    entries = value.get("entries", value) if isinstance(value, dict) else value
    points = list(_points(entries if isinstance(entries, list) else [entries]))
    if not points:
        raise Unrecognised(f"{path}: none of the forms that a report is made of; give {FORMS}")
    found.points += points
    return f"baselines of {plural(len(points), 'commit')}"


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _converted(path: Path, value: object, type_: type[T], what: str) -> T:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: not {what}: {error}") from error


def _deal(path: Path, cells: Sequence[Cell], found: Inputs) -> None:
    """A card for each engine and version; one that was read before, from another file, is not shown twice."""
    for engine, version in dict.fromkeys((cell.engine, cell.version) for cell in cells):
        mine = tuple(cell for cell in cells if (cell.engine, cell.version) == (engine, version))
        if any(card.cells == mine for card in found.cards):
            continue
        plain = f"{engine} {version}" if version and not engine.endswith(f"@{version}") else engine
        taken = {card.name for card in found.cards}
        names = [plain, f"{plain} ({path.parent.name})", f"{plain} ({_shown(path)})"]
        free = [name for name in names if name not in taken]
        name = free[0] if free else f"{names[-1]} #{len(taken)}"
        found.cards.append(Card(name=name, engine=engine, version=version, cells=mine))


def _points(entries: Sequence[Any]) -> Iterator[Point]:
    """Of whatever has a date and numbers under `counted` or `timed`."""
    for entry in entries:
        if not isinstance(entry, dict) or not ({"counted", "timed"} & set(entry)):
            continue
        figures = {
            f"{kind} / {name}": value for kind in ("counted", "timed") for name, value in numbers(entry.get(kind))
        }
        if figures:
            runner = next(
                (str(entry[name]) for name in ("runner_class", "runner class", "runner") if name in entry), ""
            )
            yield Point(runner, str(entry.get("date", "")), str(entry.get("commit", "")), figures)


def _junit(path: Path) -> tuple[FileTime, ...]:
    text = path.read_bytes()
    if b"<!DOCTYPE" in text:
        raise ValueError(f"{path}: a junit.xml has no document type; this one is not read")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"{path}: not a whole file of XML ({error}); was it cut?") from error
    if root.tag not in ("testsuites", "testsuite"):
        raise Unrecognised(f"{path}: XML, but no junit.xml: its root is <{root.tag}>; give {FORMS}")
    cases: dict[str, list[float]] = {}
    for case in root.iter("testcase"):
        cases.setdefault(str(case.get("classname", "")), []).append(_seconds(case.get("time")))
    return tuple(FileTime(file, sum(seconds), len(seconds)) for file, seconds in cases.items())


def _seconds(word: str | None) -> float:
    """0 for what is no time."""
    try:
        seconds = float(word or 0.0)
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < float("inf") else 0.0
