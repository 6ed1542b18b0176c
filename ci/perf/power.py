"""False alarms and power of the gate's rule, simulated from timings that were recorded with the same source twice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

from ci.perf.gate import CONTROL
from ci.perf.rule import Clock, Floats, Rule, values_of
from ci.perf.timed import Block

CHUNK_NUMBERS = 3_000_000
"""Means of two values that are held at once."""
PROMISED = 0.001
"""False alarms of a gate run."""
CANDIDATES = (8, 12, 16, 24, 32, 48)
"""Blocks of a first look; a second one has twice as many."""
CONFIDENCE = 0.95
SLOWER = {0.05: 0.99, 0.02: 0.80}
"""Slowdowns, and in what part of the runs they must be seen."""
ENGINE = "reference_engine/engine.py"
STEP = """

def _slowed(step, part):
    import time

    def slow(self):
        start = time.thread_time()
        output = step(self)
        end = start + (time.thread_time() - start) * (1 + part)
        while time.thread_time() < end:
            pass
        return output

    return slow


LLMEngine.step = _slowed(LLMEngine.step, {part})
"""
"""What makes every step of an engine slower by a part of its own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarms:
    """Of so many runs without a difference, how many failed; `bound`: the rate lies below it, at CONFIDENCE."""

    runs: int
    alarms: int

    @property
    def bound(self) -> float:
        return float(binomtest(self.alarms, self.runs, alternative="less").proportion_ci(CONFIDENCE).high)


def values(blocks: Sequence[Block], clock: Clock = "cpu") -> tuple[tuple[str, ...], Floats]:
    """Names of the benchmarks that the gate judges, and their values, [blocks, benchmarks]."""
    names = tuple(name for name in blocks[0].pairs if name != CONTROL)
    return names, np.stack([values_of(blocks, name, clock) for name in names], axis=1)


def alarms(recorded: Floats, rule: Rule, runs: int, seed: int = 0) -> Alarms:
    """Whole gate runs."""
    found = sum(int(both.any(axis=1).sum()) for both in _verdicts(recorded, rule, runs, 0.0, seed))
    return Alarms(runs=runs, alarms=found)


def caught(recorded: Floats, rule: Rule, slower: float, runs: int, seed: int = 0) -> Floats:
    """In what part of the runs a slowdown of one benchmark is seen, for each of them. `slower`: 0.05 is 5 %."""
    shift = math.log1p(slower)
    seen = sum((both > 0).sum(axis=0) for both in _verdicts(recorded, rule, runs, shift, seed))
    return np.asarray(seen / runs)


def needed(recorded: Floats, rule: Rule, runs: int, seed: int = 0) -> Rule | None:
    """The rule with the fewest blocks that sees what SLOWER says of every benchmark; None where CANDIDATES end."""
    for blocks in CANDIDATES:
        wider = replace(rule, screen_blocks=blocks, confirm_blocks=2 * blocks)
        if all(caught(recorded, wider, slower, runs, seed).min() >= part for slower, part in SLOWER.items()):
            return wider
    return None


def _verdicts(recorded: Floats, rule: Rule, runs: int, shift: float, seed: int) -> Iterator[np.ndarray]:
    """[runs, benchmarks]: 1, -1 or 0, a chunk at a time."""
    rng = np.random.default_rng(seed)
    chunk = max(1, 2 * CHUNK_NUMBERS // (recorded.shape[1] * rule.confirm_blocks**2))
    for start in range(0, runs, chunk):
        size = min(chunk, runs - start)
        first = rule.suspects(_stretches(rng, recorded, size, rule.screen_blocks) + shift)
        second = rule.confirmed(_stretches(rng, recorded, size, rule.confirm_blocks) + shift, recorded.shape[1])
        yield np.where(first == second, first, 0)


def _stretches(rng: np.random.Generator, recorded: Floats, size: int, blocks: int) -> Floats:
    """[size, benchmarks, blocks]: what came one after another stays together, so that drift is kept. A block's sign is
    that of a coin, for all of its benchmarks alike: which of two equal sources is called head is one."""
    starts = rng.integers(len(recorded), size=(size, 1))
    rows = (starts + np.arange(blocks)) % len(recorded)
    signs = rng.choice([-1.0, 1.0], size=(size, blocks, 1))
    return np.asarray((recorded[rows] * signs).transpose(0, 2, 1))


def plant(root: Path, part: float) -> None:
    """Make every step of the engine in a source tree slower by this part of its own time."""
    file = root / ENGINE
    file.write_text(file.read_text(encoding="utf-8") + STEP.format(part=part), encoding="utf-8")
