"""The first bad commit of a range, by timing or counting each candidate against the good one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ci.perf import gate, trees
from ci.perf.gate import Finding
from ci.perf.rule import Rule, effect, values_of
from ci.perf.workloads import BENCHMARKS
from ci.perf.workplace import Workplace

Measured = Callable[[str], float]
"""A commit -> how much worse than the good one it is, as a log ratio. Raises ValueError where it cannot be measured."""
TINY = 1e-9


@dataclass(slots=True, kw_only=True)
class Search:
    """`commits`: the range, oldest first, the good one left out. `bad`: log ratio from which a commit counts as bad.
    `skipped`: commits that could not be measured."""

    commits: Sequence[str]
    measure: Measured
    bad: float
    say: Callable[[str], None] = lambda _: None
    skipped: dict[str, str] = field(default_factory=dict)
    effects: dict[str, float] = field(default_factory=dict)

    def first(self) -> list[str]:
        """The first bad commit; more than one where those before it could not be measured."""
        low, high = -1, len(self.commits) - 1
        while high - low > 1:
            at = next((at for at in _outwards(low, high) if self._measurable(at)), None)
            if at is None:
                break
            low, high = (low, at) if self._is_bad(at) else (at, high)
        return list(self.commits[low + 1 : high + 1])

    def _measurable(self, at: int) -> bool:
        commit = self.commits[at]
        if commit not in self.skipped:
            try:
                self.effects[commit] = self.measure(commit)
            except ValueError as error:
                self.skipped[commit] = str(error)
        return commit not in self.skipped

    def _is_bad(self, at: int) -> bool:
        commit = self.commits[at]
        size = self.effects[commit]
        self.say(f"{commit[:12]}: {100 * math.expm1(size):+.1f} %: {'bad' if size >= self.bad else 'good'}")
        return size >= self.bad


def _outwards(low: int, high: int) -> list[int]:
    """What lies between, the middle first."""
    middle = (low + high) // 2
    return sorted(range(low + 1, high), key=lambda at: abs(at - middle))


def commits_between(good: str, bad: str, root: Path = trees.ROOT) -> list[str]:
    """Oldest first, along first parents. Raises ValueError when `bad` does not come after `good`."""
    if trees.git("merge-base", good, bad, root=root) != trees.git("rev-parse", f"{good}^{{commit}}", root=root):
        raise ValueError(f"{good}..{bad}: the second does not come after the first; GOOD must be an ancestor of BAD")
    found = trees.git("rev-list", "--first-parent", "--reverse", f"{good}..{bad}", root=root).splitlines()
    if not found:
        raise ValueError(f"{good}..{bad}: there is no commit in between; give an older GOOD")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Source trees of commits, below `folder`, written when they are first asked for."""

    folder: Path
    root: Path = trees.ROOT

    def of(self, commit: str) -> Path:
        place = self.folder / trees.git("rev-parse", commit, root=self.root)
        return place if place.is_dir() else trees.extract(trees.hashes(commit, self.root), place, self.root)


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """How candidates are measured against the good commit: by one benchmark, or by one counted figure."""

    good: str
    sources: Sources
    place: Workplace
    rule: Rule

    def what_differs(self, bad: str, figure: str = "") -> tuple[str, float, Measured]:
        """The figure to follow, how much worse it is at `bad` (log ratio), and what measures it. Without a name, what a
        count shows goes before what timings show. Raises ValueError when nothing is worse."""
        if figure in BENCHMARKS:
            return self._timed(bad, figure)
        accepted, there = self._count(self.good, figure), self._count(bad, figure)
        if figure and (figure not in accepted or figure not in there):
            raise ValueError(f"--figure {figure}: is neither timed nor counted at both ends")
        worse = [finding for finding in _largest_first(accepted, there) if figure in ("", finding.name)]
        if worse:
            name = worse[0].name
            return name, _times(accepted, there, name), lambda commit: self._counted(commit, accepted, name)
        if figure:
            raise ValueError(f"{figure}={accepted[figure]:g}: is no worse at {bad}; there is nothing to find")
        outcome = gate.judge_timed(self.place.measure(self._good, self.sources.of(bad), self.rule.pairs), self.rule)
        slower = [timing for timing in outcome.timings if timing.verdict > 0]
        if not slower:
            raise ValueError(
                f"nothing is worse at {bad} than at {self.good}; name what is with --figure, or more --blocks"
            )
        return self._timed(bad, max(slower, key=lambda timing: timing.effect).name)

    @property
    def _good(self) -> Path:
        return self.sources.of(self.good)

    def _count(self, commit: str, figure: str = "") -> dict[str, float]:
        """Of the place that a figure belongs to, or of all."""
        return self.place.count(self.sources.of(commit), [figure.rpartition("/")[0]] if figure else ())

    def _timed(self, bad: str, name: str) -> tuple[str, float, Measured]:
        size = self._seconds(bad, name)
        if size < self.rule.smallest:
            raise ValueError(f"{name}: takes {100 * math.expm1(size):+.1f} % at {bad}; there is nothing to find")
        return name, size, lambda commit: self._seconds(commit, name)

    def _seconds(self, commit: str, name: str) -> float:
        rule = self.rule
        recording = self.place.record(self._good, self.sources.of(commit), rule.screen_blocks, rule.pairs, [name])
        if name in recording.failures:
            raise ValueError(recording.failures[name])
        return float(effect(values_of(recording.blocks, name)))

    def _counted(self, commit: str, accepted: Mapping[str, float], name: str) -> float:
        now = self._count(commit, name)
        if name not in now:
            raise ValueError(f"{name} is not counted there")
        return _times(accepted, now, name)


def _times(accepted: Mapping[str, float], now: Mapping[str, float], name: str) -> float:
    """By how much a figure is worse, as a log ratio. A figure of 0 counts as next to nothing."""
    ratio = math.log(max(now[name], TINY) / max(accepted[name], TINY))
    return -ratio if name.rpartition("/")[2] in gate.HIGHER_IS_BETTER else ratio


def _largest_first(accepted: Mapping[str, float], now: Mapping[str, float]) -> list[Finding]:
    found = [finding for finding in gate.compare_counted(accepted, now) if finding.kind == "regression"]
    return sorted(found, key=lambda finding: -_times(accepted, now, finding.name))


def title(commit: str, root: Path = trees.ROOT) -> str:
    """Hash, date, author and subject of a commit."""
    return trees.git("show", "--no-patch", "--format=%h %ad %an: %s", "--date=short", commit, root=root)
