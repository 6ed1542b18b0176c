"""Tables of the `perf` commands."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.table import Table

from ci.perf import power as simulation
from ci.perf.gate import CONTROL, Outcome
from ci.perf.power import CONFIDENCE, PROMISED, SLOWER
from ci.perf.rule import Floats, Rule, seconds, values_of
from ci.perf.timed import Block

PLACES = 1
SEARCH_RUNS = 1000
"""Simulated runs for each candidate when the fewest blocks are looked for."""
NORMAL = 1.4826
"""A median absolute deviation times this is a standard deviation, where noise is normal."""
SEEN_BY = 4.5
"""Standard errors of a first look that an effect needs to be seen nearly always."""


def percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):+.{PLACES}f} %"


def spread(values: Floats) -> float:
    """Standard deviation of blocks, however far the outliers lie."""
    return float(NORMAL * np.median(np.abs(values - np.median(values))))


def timings(outcome: Outcome, rule: Rule) -> Table:
    """What was seen, and what this run could have seen."""
    head = f"timed, {rule.screen_blocks} blocks of {rule.pairs} pairs"
    table = Table(head, "against accepted", "could see", "verdict", box=None, pad_edge=False)
    for timing in outcome.timings:
        visible = max(rule.smallest, SEEN_BY * spread(timing.screen) / math.sqrt(len(timing.screen)))
        looked = "" if timing.confirm is None else " (looked twice)"
        verdict = {1: "slower", 0: "same", -1: "faster"}[timing.verdict] + looked
        table.add_row(timing.name, percent(timing.effect), percent(visible), verdict)
    return table


def clocks(blocks: Sequence[Block]) -> Table:
    """Noise by the two clocks: standard deviation of a block's value."""
    each = sum(block.seconds for block in blocks) / len(blocks)
    head = f"{len(blocks)} blocks of {len(blocks[0].pairs[CONTROL])} pairs, {each:.1f} s each"
    table = Table(head, "ms", "noise by CPU time", "by the wall", box=None, pad_edge=False)
    for name in blocks[0].pairs:
        took = 1e3 * float(np.median(seconds(blocks, name, "base")))
        noise = [spread(values_of(blocks, name, clock)) for clock in ("cpu", "wall")]
        table.add_row(name, f"{took:.2f}", *(f"{100 * one:.2f} %" for one in noise))
    return table


def power(blocks: Sequence[Block], rule: Rule, runs: int) -> tuple[Table, bool]:
    """False alarms and power, and whether both are as promised with the rule as it is."""
    names, recorded = simulation.values(blocks)
    table = Table(f"{runs} simulated runs, {len(names)} benchmarks", "", box=None, pad_edge=False)
    found = simulation.alarms(recorded, rule, runs)
    bound = f"below {100 * found.bound:.3f} % ({100 * CONFIDENCE:g} % sure)"
    table.add_row("false alarms of a gate run", f"{found.alarms} of {found.runs}: {bound}")
    fine = found.bound <= PROMISED
    for slower, part in SLOWER.items():
        seen = simulation.caught(recorded, rule, slower, max(runs // 10, 1000))
        worst = int(seen.argmin())
        fine &= bool(seen[worst] >= part)
        least = f"{100 * seen[worst]:.1f} % of the runs ({names[worst]}) to {100 * seen.max():.1f} %"
        table.add_row(f"{100 * slower:g} % slower is seen in", least)
    table.add_row("repeats", _repeats(rule))
    wider = simulation.needed(recorded, rule, SEARCH_RUNS)
    promise = " and ".join(f"{100 * s:g} % in {100 * part:g} %" for s, part in SLOWER.items())
    table.add_row(f"repeats for {promise}", "more than are tried here" if wider is None else _repeats(wider))
    return table, fine


def _repeats(rule: Rule) -> str:
    first, second = (f"{n} blocks x {rule.pairs} pairs" for n in (rule.screen_blocks, rule.confirm_blocks))
    return f"{first}, suspects {second}"
