"""Real runs that the gate is tested with: the same source twice, or one of them slower on purpose."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ci.perf import gate, power, trees
from ci.perf.rule import Rule
from ci.perf.workplace import Workplace

SLOWED = "engine/"
"""Benchmarks that a slower step makes slower."""


def record(place: Workplace, blocks: int, pairs: int, out: Path) -> Path:
    """Timings of HEAD's source, twice, into `out`."""
    base, head = _twice(place)
    place.record(base, head, blocks, pairs)
    out.parent.mkdir(parents=True, exist_ok=True)
    # The session's own file is as long as its process wrote it.
    (written,) = place.folder.glob("timings-*.json")
    shutil.move(written, out)
    return out


def real(place: Workplace, rule: Rule, runs: int, part: float, say: Callable[[str], None]) -> bool:
    """Run the timed part of the gate so often; `part`: by which every step of head is slower, 0 for an A/A run. Whether
    all runs said what is the case."""
    base, head = _twice(place)
    if part:
        power.plant(head, part)
    measure = place.measure(base, head, rule.pairs)
    wrong = 0
    for number in range(1, runs + 1):
        findings = gate.judge_timed(measure, rule).findings
        slower = {finding.name for finding in findings if finding.kind == "regression"}
        right = any(name.startswith(SLOWED) for name in slower) if part else not findings
        wrong += not right
        say(f"run {number} of {runs}: {'; '.join(map(str, findings)) or 'passes'}")
    what = f"planted slowdown of {100 * part:g} % missed" if part else "false alarms"
    say(f"{wrong} of {runs} real runs: {what}")
    return wrong == 0


def _twice(place: Workplace) -> tuple[Path, Path]:
    sources = trees.hashes()
    return tuple(  # type: ignore[return-value]  # two of them
        place.folder / name if (place.folder / name).is_dir() else place.source(name, sources)
        for name in ("base", "head")
    )
