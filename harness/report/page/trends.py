"""Every figure of the baselines over time, a small plot each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from markupsafe import Markup

from harness.report.page import svg
from harness.report.page.base import Panel, distinct, render, short
from harness.report.page.inputs import Inputs, Point
from harness.report.table import plural

WIDTH, HEIGHT, LEFT, RIGHT, TOP, FOOT = 260, 96, 46, 10, 8, 20


@dataclass(frozen=True, slots=True)
class Series:
    """One figure, oldest first: (date, commit, value)."""

    name: str
    values: tuple[tuple[str, str, float], ...]

    @property
    def change(self) -> float | None:
        """Relative, from the last but one to the last; None where there is nothing to divide."""
        if len(self.values) < 2 or not self.values[-2][2]:
            return None
        return self.values[-1][2] / self.values[-2][2] - 1


def panel(inputs: Inputs) -> Panel | None:
    if not inputs.points:
        return None
    runners = {runner: series(inputs.points, runner) for runner in sorted({point.runner for point in inputs.points})}
    dates = sorted(point.date for point in inputs.points)
    return Panel(
        id="trends",
        title="Trends",
        lead=f"{plural(len(inputs.points), 'baseline')}, {dates[0][:10]} to {dates[-1][:10]}. Counted figures are "
        "the same on every machine; timed ones are ratios to a control of the same run.",
        body=render(
            "trends.html",
            runners={runner: [(one, _told(one), draw(one)) for one in some] for runner, some in runners.items()},
        ),
    )


def series(points: Sequence[Point], runner: str) -> list[Series]:
    """The figures of one class of runners; what does not change comes last."""
    mine = sorted((point for point in points if point.runner == runner), key=lambda point: point.date)
    names = distinct(name for point in mine for name in point.figures)
    found = [
        Series(name, tuple((p.date, p.commit, p.figures[name]) for p in mine if name in p.figures)) for name in names
    ]
    return sorted(found, key=lambda one: len({value for _, _, value in one.values}) == 1)


def _told(one: Series) -> str:
    last, change = one.values[-1][2], one.change
    if change is None:
        return short(last)
    return f"{short(last)}, {'unchanged' if not change else f'{change:+.1%}'}"


def draw(one: Series) -> Markup:
    """Values over the order of the commits, with the first and the last date."""
    values = [value for _, _, value in one.values]
    low, high = min(values), max(values)
    spare = (high - low) * 0.1 or abs(high) * 0.1 or 1.0
    low, high = low - spare, high + spare
    step = (WIDTH - LEFT - RIGHT) / max(len(values) - 1, 1)
    room = HEIGHT - TOP - FOOT
    points = [(LEFT + step * i, TOP + room * (high - value) / (high - low)) for i, value in enumerate(values)]
    drawn: list[Element] = []
    for mark in svg.ticks(low, high, 2):
        y = TOP + room * (high - mark) / (high - low)
        drawn += [
            svg.line(LEFT, y, WIDTH - RIGHT, y, "grid"),
            svg.text(LEFT - 4, y + 3, short(mark), "tiny muted", "end"),
        ]
    drawn.append(svg.polyline(points, "trend"))
    for (x, y), (date, commit, value) in zip(points, one.values, strict=True):
        hint = svg.element("title", f"{date[:10]} {commit[:10]}: {short(value)}")
        drawn.append(svg.element("circle", hint, cx=x, cy=y, r=3.0, class_="point"))
    first, last = one.values[0][0][:10], one.values[-1][0][:10]
    drawn.append(svg.text(LEFT, HEIGHT - 4, first, "tiny muted"))
    if len(values) > 1:
        drawn.append(svg.text(WIDTH - RIGHT, HEIGHT - 4, last, "tiny muted", "end"))
    return svg.picture(WIDTH, HEIGHT, f"{one.name}: {', '.join(map(short, values[-12:]))}", drawn)
