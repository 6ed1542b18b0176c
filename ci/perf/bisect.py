"""The first bad commit of a range, by timing or counting each candidate against the good one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ci.perf import gate, timed, trees
from ci.perf.gate import Finding
from ci.perf.rule import Rule, effect, values_of


class Measured(Protocol):
    """How far a commit is from the good one."""

    def __call__(self, commit: str) -> float: ...


@dataclass(slots=True, kw_only=True)
class Search:
    """`commits`: the range, oldest first, the good one left out. `bad`: log ratio from which a commit counts as bad.
    `skipped`: commits that could not be measured."""

    commits: Sequence[str]
    measure: Measured
    bad: float
    say: Callable[[str], None] = lambda _: None
    skipped: dict[str, str] = field(default_factory=dict)

    def first(self) -> list[str]:
        """The first bad commit; more than one where those before it could not be measured."""
        low, high = -1, len(self.commits) - 1
        while high - low > 1:
            tried = next((at for at in _outwards(low, high) if self._measurable(at)), None)
            if tried is None:
                break
            at, is_bad = tried, self._is_bad(tried)
            low, high = (low, at) if is_bad else (at, high)
        return list(self.commits[low + 1 : high + 1])

    def _measurable(self, at: int) -> bool:
        commit = self.commits[at]
        if commit not in self.skipped:
            try:
                self._effects[commit] = self.measure(commit)
            except ValueError as error:
                self.skipped[commit] = str(error)
        return commit not in self.skipped

    def _is_bad(self, at: int) -> bool:
        commit = self.commits[at]
        size = self._effects[commit]
        self.say(f"{commit[:12]}: {100 * math.expm1(size):+.1f} %: {'bad' if size >= self.bad else 'good'}")
        return size >= self.bad

    _effects: dict[str, float] = field(default_factory=dict)


def _outwards(low: int, high: int) -> list[int]:
    """What lies between, the middle first."""
    middle = (low + high) // 2
    return sorted(range(low + 1, high), key=lambda at: abs(at - middle))


def commits_between(good: str, bad: str, root: Path = trees.ROOT) -> list[str]:
    """Oldest first, along first parents. Raises ValueError when `bad` does not come after `good`."""
    trees.git("merge-base", "--is-ancestor", good, bad, root=root)
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


def timed_against(good: Path, sources: Sources, checkpoints: Path, name: str, rule: Rule) -> Measured:
    """Effect on one benchmark, good and candidate taking turns."""

    def measure(commit: str) -> float:
        recording = timed.record(
            good,
            sources.of(commit),
            checkpoints,
            sources.folder,
            blocks=rule.screen_blocks,
            pairs=rule.pairs,
            only=[name],
        )
        if name in recording.failures:
            raise ValueError(recording.failures[name])
        return float(effect(values_of(recording.blocks, name)))

    return measure


def counted_against(accepted: dict[str, float], sources: Sources, checkpoints: Path, name: str) -> Measured:
    """Change of one counted figure for the worse, as a log ratio."""

    def measure(commit: str) -> float:
        now = gate.count(sources.of(commit), sources.folder / f"{commit}.json", checkpoints)
        if name not in now:
            raise ValueError(f"{name} is not counted there")
        worse = -1 if name.rpartition("/")[2] in gate.HIGHER_IS_BETTER else 1
        return worse * math.log(max(now[name], 1e-9) / max(accepted[name], 1e-9))

    return measure


def counted_regressions(accepted: dict[str, float], now: dict[str, float]) -> list[Finding]:
    """Largest changes first."""

    def size(finding: Finding) -> float:
        return -abs(math.log(max(now[finding.name], 1e-9) / max(accepted[finding.name], 1e-9)))

    return sorted((f for f in gate.compare_counted(accepted, now) if f.kind == "regression"), key=size)
