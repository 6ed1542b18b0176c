"""The kill matrix of the bug zoo: which invariant saw which planted fault."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.page.base import Panel, render
from harness.report.page.forms import Kill, Mutant, Trial, Zoo
from harness.report.page.inputs import Inputs
from harness.report.table import plural
from harness.report.zoo import MARKS

NOTHING = "(nothing edited)"


@dataclass(frozen=True, slots=True)
class Line:
    """One mutant: a key of `MARKS` for each invariant, and what saw it first."""

    mutant: Mutant
    marks: tuple[str, ...]
    kills: tuple[Kill, ...]


def panel(inputs: Inputs) -> Panel | None:
    zoos = [zoo for zoo in inputs.zoos if zoo.mutants]
    if not zoos:
        return None
    return Panel(
        id="zoo",
        title="Kill matrix of the zoo",
        lead="Faults that real engines had, planted in the reference engine one at a time. "
        + ", ".join(f"{sign} {meaning}" for sign, _, meaning in MARKS.values())
        + ".",
        body=render(
            "zoo.html",
            zoos=[(_summary(zoo), columns(zoo), lines(zoo)) for zoo in zoos],
            signs={key: sign for key, (sign, _, _) in MARKS.items()},
            meanings={key: meaning for key, (_, _, meaning) in MARKS.items()},
        ),
    )


def columns(zoo: Zoo) -> list[str]:
    """The invariants that anything expected or saw."""
    told = {name for one in zoo.mutants for name in (*one.red, *one.may, *one.trial.red)}
    return sorted(told | {name for trial in zoo.controls for name in trial.red})


def lines(zoo: Zoo) -> list[Line]:
    """The mutants, and at the end the controls, in which nothing was edited."""
    names = columns(zoo)
    controls = [Mutant(id=f"{NOTHING} {', '.join(trial.lanes)}", trial=trial) for trial in zoo.controls]
    return [_line(one, names) for one in (*zoo.mutants, *controls)]


def _line(one: Mutant, names: Sequence[str]) -> Line:
    return Line(one, tuple(_mark(one, one.trial, name) for name in names), one.trial.kills)


def _mark(one: Mutant, trial: Trial, name: str) -> str:
    if name in trial.red:
        return "must" if name in one.red else "may" if name in one.may else "wrong"
    return "missed" if name in one.red else "green"


def _summary(zoo: Zoo) -> str:
    times = [one.time_to_kill for one in zoo.mutants if one.killed and one.time_to_kill is not None]
    killed = sum(one.killed for one in zoo.mutants)
    quick = f", median time to kill {statistics.median(times):.1f} s, longest {max(times):.1f} s" if times else ""
    wrong = sum(bool(trial.kills) for trial in zoo.controls)
    return (
        f"{killed} of {plural(len(zoo.mutants), 'mutant')} killed{quick}; "
        f"{plural(len(zoo.controls), 'lane')} with nothing edited, {wrong} of them red."
    )
