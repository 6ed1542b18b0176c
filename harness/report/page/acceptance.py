"""How many drafts were accepted: the histogram of accept lengths, and the share accepted at each position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from harness.report.page import svg
from harness.report.page.base import Panel, render
from harness.report.page.inputs import Inputs
from harness.report.page.recordings import Recording

HEIGHT, STEP, FOOT, TOP = 54, 26, 14, 13
"""Of a small bar chart, in pixels; STEP is the width of a bar with its space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Of one engine and drafter at one depth k, over all of its recorded runs. `offered[i]` counts verify steps with a
    draft at position i (0-based), `accepted[i]` those that accepted it."""

    lane: str
    k: int
    engine: str
    runs: int
    steps: int
    histogram: Mapping[int, int]
    offered: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(length * count for length, count in self.histogram.items()) / self.steps

    @property
    def shares(self) -> list[float]:
        return [got / of if of else 0.0 for got, of in zip(self.accepted, self.offered, strict=True)]


def panel(inputs: Inputs) -> Panel | None:
    groups = acceptances(inputs.recordings)
    if not groups:
        return None
    return Panel(
        id="acceptance",
        title="Acceptance",
        lead="Accept length = correct drafts + 1, per verify step, before a finish cut the block. A draft "
        "is accepted where all before it were.",
        body=render("acceptance.html", groups=[(one, _histogram(one), _positions(one)) for one in groups]),
    )


def acceptances(recordings: Sequence[Recording]) -> list[Acceptance]:
    """Raw sums over the runs of each group; groups without a verify step are left out."""
    groups: dict[tuple[str, str, str, int], list[Recording]] = {}
    for one in recordings:
        if any(request.accept_lens for request in one.accepted):
            groups.setdefault((one.engine, one.version, one.lane, one.k), []).append(one)
    return [_sum(key, groups[key]) for key in sorted(groups)]


def _sum(key: tuple[str, str, str, int], runs: Sequence[Recording]) -> Acceptance:
    engine, version, lane, k = key
    steps = [
        (accept_len, min(draft_len, k))
        for run in runs
        for request in run.accepted
        for accept_len, draft_len in zip(request.accept_lens, request.draft_lens, strict=False)
    ]
    return Acceptance(
        lane=lane,
        k=k,
        engine=f"{engine} {version}",
        runs=len(runs),
        steps=len(steps),
        histogram=Counter(accept_len for accept_len, _ in steps),
        offered=tuple(sum(drafts > place for _, drafts in steps) for place in range(k)),
        accepted=tuple(sum(drafts > place and length > place + 1 for length, drafts in steps) for place in range(k)),
    )


def _histogram(one: Acceptance) -> Markup:
    lengths = range(min(1, *one.histogram), max(one.histogram) + 1)
    bars = [(str(length), one.histogram.get(length, 0), str(one.histogram.get(length, 0))) for length in lengths]
    told = ", ".join(f"{name}: {words}" for name, _, words in bars)
    return _bars(bars, max(one.histogram.values()), "accept length", f"steps by accept length, {told}")


def _positions(one: Acceptance) -> Markup:
    bars = [(str(place + 1), share, f"{100 * share:.0f}%") for place, share in enumerate(one.shares)]
    told = ", ".join(f"{name}: {words}" for name, _, words in bars)
    return _bars(bars, 1.0, "draft position", f"share accepted by position, {told}")


def _bars(bars: Sequence[tuple[str, float, str]], most: float, axis: str, label: str) -> Markup:
    """(name below, height, words above) a bar each."""
    base, room, width = HEIGHT - FOOT, HEIGHT - FOOT - TOP, STEP * len(bars)
    drawn = [svg.line(0, base, width, base, "axis")]
    for place, (name, value, words) in enumerate(bars):
        height, middle = room * value / most if most else 0.0, STEP * (place + 0.5)
        drawn.append(svg.rect(middle - 9, base - height, 18, height, "bar", f"{axis} {name}: {words}"))
        drawn.append(svg.text(middle, base - height - 3, words, "tiny", "middle"))
        drawn.append(svg.text(middle, base + 11, name, "tiny muted", "middle"))
    return svg.picture(width, HEIGHT, label, drawn)
