"""The gate: counted figures against the baseline, timed ones against the accepted source, and what is missing."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from ci.perf import timed, trees
from ci.perf.baselines import Baseline
from ci.perf.rule import Floats, Rule, effect, values_of

Kind = Literal["regression", "gain", "missing", "vanished", "failed"]
ACCEPT = "draftproof perf accept"
CONTROL = "control"
HIGHER_IS_BETTER = ("accept_length",)
MARGINS = {"engine/random/": 0.01}
"""Relative margins of counted figures, by the start of their name: where tokens may depend on rounding."""
OPERATOR_FIGURES = ("operators", "operators_per_step", "copied_bytes", "copied_bytes_per_token", "peak_bytes")
"""What another version of torch may count otherwise."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason to fail."""

    kind: Kind
    name: str
    message: str

    def __str__(self) -> str:
        mend = f"; if it is meant, `{ACCEPT}` writes the new baseline" if self.kind != "failed" else ""
        return f"{self.kind}: {self.name}: {self.message}{mend}"


@dataclass(slots=True, kw_only=True)
class Timing:
    """What was seen of one benchmark. Values are those of blocks, log(head / base)."""

    name: str
    screen: Floats
    confirm: Floats | None = None
    verdict: int = 0

    @property
    def effect(self) -> float:
        return float(effect(self.screen if self.confirm is None else self.confirm))


@dataclass(slots=True, kw_only=True)
class Outcome:
    findings: list[Finding] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)


def margin_of(name: str) -> float:
    return next((margin for start, margin in MARGINS.items() if name.startswith(start)), 0.0)


def compare_counted(accepted: Mapping[str, float], now: Mapping[str, float], torch: str = "") -> Iterator[Finding]:
    """`torch`: says how the version of torch differs from the baseline's, where it does."""
    yield from compare_names(accepted, now)
    for name, value in now.items():
        if name not in accepted or _same(name, accepted[name], value):
            continue
        worse = (value < accepted[name]) == (name.rpartition("/")[2] in HIGHER_IS_BETTER)
        change = f"{accepted[name]:g} -> {value:g}"
        if torch and name.rpartition("/")[2] in OPERATOR_FIGURES:
            change += f" ({torch})"
        yield Finding(kind="regression" if worse else "gain", name=name, message=change)


def _same(name: str, accepted: float, value: float) -> bool:
    return math.isclose(accepted, value, rel_tol=margin_of(name), abs_tol=1e-9)


def compare_names(accepted: Iterable[str], now: Iterable[str]) -> Iterator[Finding]:
    accepted, now = list(accepted), list(now)
    for name in now:
        if name not in accepted:
            yield Finding(kind="missing", name=name, message="the baseline has no entry for it")
    for name in accepted:
        if name not in now:
            yield Finding(kind="vanished", name=name, message="it is in the baseline and was not measured")


def count(root: Path, out: Path, checkpoints: Path, only: Sequence[str] = ()) -> dict[str, float]:
    """Counted figures of the source at `root`, from a process of its own. Raises ValueError when that fails."""
    command = [sys.executable, "-m", "ci.perf.counted", str(root), str(checkpoints), str(out)]
    command += [f"--only={place}" for place in only]
    done = subprocess.run(command, cwd=trees.ROOT, env=timed.environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["nothing was said"]
        raise ValueError(f"counting {root}: {said[-1]}")
    return msgspec.json.decode(out.read_bytes(), type=dict[str, float])


Measure = Callable[[int, Sequence[str]], timed.Recording]
"""(blocks, names, none for all) -> timings of base and head."""


def judge_timed(measure: Measure, rule: Rule, say: Progress = lambda _: None) -> Outcome:
    """Screen all benchmarks, then look at the suspects again."""
    screen = measure(rule.screen_blocks, ())
    outcome = Outcome(findings=[failed(name, why) for name, why in screen.failures.items()])
    names = [name for name in screen.blocks[0].pairs if name != CONTROL and name not in screen.failures]
    outcome.timings = [Timing(name=name, screen=values_of(screen.blocks, name)) for name in names]
    suspects = {t.name: int(rule.suspects(t.screen)) for t in outcome.timings if rule.suspects(t.screen)}
    if not suspects:
        return outcome
    say(f"looking again at {', '.join(suspects)}")
    again = measure(rule.confirm_blocks, list(suspects))
    outcome.findings += [failed(name, why) for name, why in again.failures.items()]
    for timing in outcome.timings:
        if timing.name in suspects and timing.name not in again.failures:
            timing.confirm = values_of(again.blocks, timing.name)
            seen = int(rule.confirmed(timing.confirm, len(names)))
            timing.verdict = seen if seen == suspects[timing.name] else 0
    outcome.findings += [_timed_finding(timing) for timing in outcome.timings if timing.verdict]
    return outcome


def failed(name: str, why: str) -> Finding:
    return Finding(kind="failed", name=name, message=f"could not be measured: {why}")


def _timed_finding(timing: Timing) -> Finding:
    percent = 100 * math.expm1(timing.effect)
    kind: Kind = "regression" if timing.verdict > 0 else "gain"
    return Finding(kind=kind, name=timing.name, message=f"takes {percent:+.1f} % of the accepted source's time")


def torch_differs(baseline: Baseline, version: str) -> str:
    before = baseline.provenance.torch
    return "" if before == version else f"accepted with torch {before}, this is {version}"
