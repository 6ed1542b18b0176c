"""Latency and throughput: the spread of each benchmark, the figures that it told, and the time of each test file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from xml.etree.ElementTree import Element

from markupsafe import Markup

from harness.report.page import svg
from harness.report.page.base import Panel, duration, render, short
from harness.report.page.forms import Benchmark, Benchmarks
from harness.report.page.inputs import Inputs, Session
from harness.report.table import plural

WIDTH, NAMES, LINE, PAD = 980, 410, 22, 12
LOG_FROM = 30.0
"""Ratio of the longest to the shortest time from which the axis is logarithmic."""
RATES = ("per_second", "tokens/s", "_per_s", "throughput")
"""What the name of a figure holds that is a throughput."""
FILES_SHOWN = 40


def panel(inputs: Inputs) -> Panel | None:
    runs = [run for run in inputs.benchmarks if run.benchmarks]
    if not runs and not inputs.sessions:
        return None
    return Panel(
        id="timing",
        title="Latency and throughput",
        lead="A box spans the middle half of the rounds, the line in it is the median, whiskers reach the extremes. "
        "Seconds depend on the machine: compare within one run.",
        body=render(
            "timing.html",
            runs=[
                (_machine(run), latency(run.benchmarks), _rates(run.benchmarks), _others(run.benchmarks))
                for run in runs
            ],
            sessions=[(one.label, _total(one), _files(one)) for one in inputs.sessions],
        ),
    )


def _machine(run: Benchmarks) -> str:
    cpu = run.machine_info.get("cpu")
    model = cpu.get("brand_raw") if isinstance(cpu, Mapping) else None
    commit = str(run.commit_info.get("id") or "")[:10]
    words = (model, run.machine_info.get("python_version") and f"Python {run.machine_info['python_version']}")
    return ", ".join(str(word) for word in (*words, commit and f"commit {commit}", run.datetime[:16]) if word)


def latency(benchmarks: Sequence[Benchmark]) -> Markup:
    """Box plots on one axis of seconds."""
    low = min(max(one.stats.min, 1e-9) for one in benchmarks)
    high = max(max(one.stats.max, 1e-9) for one in benchmarks)
    place, marks = _scale(low, high)
    foot = PAD + LINE * len(benchmarks)
    drawn: list[Element] = []
    for value in marks:
        drawn.append(svg.line(place(value), PAD, place(value), foot, "grid"))
        drawn.append(svg.text(place(value), foot + 14, duration(value) if value else "0", "small muted", "middle"))
    for number, one in enumerate(benchmarks):
        drawn += _box(one, PAD + LINE * number, place)
    told = "; ".join(f"{one.name}: median {duration(one.stats.median)}" for one in benchmarks[:20])
    return svg.picture(WIDTH, foot + 22, f"Latency: {told}", drawn)


def _scale(low: float, high: float) -> tuple[Callable[[float], float], list[float]]:
    """(seconds -> x, where the axis is marked)."""
    room = WIDTH - NAMES - 2 * PAD - 60
    if high / low < LOG_FROM:
        return (lambda value: NAMES + room * value / high), svg.ticks(0.0, high, 5)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return (
        lambda value: NAMES + room * (math.log10(max(value, 1e-9)) - first) / (last - first),
        [10.0**power for power in range(first, last + 1)],
    )


def _box(one: Benchmark, y: float, place: Callable[[float], float]) -> list[Element]:
    stats, middle = one.stats, y + LINE / 2
    ends = {name: place(getattr(stats, name)) for name in ("min", "q1", "median", "q3", "max")}
    spread = f"{duration(stats.min)} to {duration(stats.max)}, {stats.rounds} rounds"
    hint = f"{one.name}: median {duration(stats.median)}, {spread}"
    return [
        svg.text(NAMES - 8, middle + 4, _cut(one.name), "small", "end"),
        svg.line(ends["min"], middle, ends["max"], middle, "whisker"),
        svg.rect(ends["q1"], y + 4, max(ends["q3"] - ends["q1"], 1.5), LINE - 8, "bar", hint),
        svg.line(ends["median"], y + 3, ends["median"], y + LINE - 3, "median"),
        svg.text(ends["max"] + 6, middle + 4, duration(stats.median), "small muted"),
    ]


def _is_rate(name: str) -> bool:
    return any(word in name.lower() for word in RATES)


def _rates(benchmarks: Sequence[Benchmark]) -> Markup | None:
    told = [(f"{one.name}: {name}", value) for one in benchmarks for name, value in one.figures() if _is_rate(name)]
    return _bars([(name, value, short(value)) for name, value in told], "Throughput") if told else None


def _others(benchmarks: Sequence[Benchmark]) -> list[tuple[str, list[tuple[str, float]]]]:
    told = [(one.name, [(name, value) for name, value in one.figures() if not _is_rate(name)]) for one in benchmarks]
    return [(name, figures) for name, figures in told if figures]


def _total(session: Session) -> str:
    files = session.files
    tests, seconds = sum(one.tests for one in files), sum(one.seconds for one in files)
    return f"{plural(len(files), 'file')}, {plural(tests, 'test')}, {duration(seconds)} in all"


def _files(session: Session) -> Markup:
    """The longest first."""
    files = sorted(session.files, key=lambda one: -one.seconds)
    shown = [
        (one.file, one.seconds, f"{duration(one.seconds)}, {plural(one.tests, 'test')}") for one in files[:FILES_SHOWN]
    ]
    left = files[FILES_SHOWN:]
    if left:
        seconds = sum(one.seconds for one in left)
        shown.append((f"{len(left)} others together", seconds, duration(seconds)))
    return _bars(shown, "Time by test file")


def _bars(bars: Sequence[tuple[str, float, str]], label: str) -> Markup:
    """(name, length, words) a line each, on an axis from 0."""
    most = max((value for _, value, _ in bars), default=0.0) or 1.0
    room = WIDTH - NAMES - 2 * PAD - 120
    drawn: list[Element] = []
    for number, (name, value, words) in enumerate(bars):
        y = 4 + LINE * number
        drawn.append(svg.text(NAMES - 8, y + 15, _cut(name), "small", "end"))
        drawn.append(svg.rect(NAMES, y + 4, room * max(value, 0.0) / most, LINE - 8, "bar", f"{name}: {words}"))
        drawn.append(svg.text(NAMES + room * max(value, 0.0) / most + 6, y + 15, words, "small muted"))
    told = "; ".join(f"{name}: {words}" for name, _, words in bars[:20])
    return svg.picture(WIDTH, 8 + LINE * len(bars), f"{label}: {told}", drawn)


def _cut(name: str, limit: int = 64) -> str:
    """In the middle: ends tell names apart."""
    return name if len(name) <= limit else f"{name[: limit // 2 - 1]}…{name[-limit // 2 :]}"
