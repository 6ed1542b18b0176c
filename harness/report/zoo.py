"""The kill matrix of the bug zoo, mutant x invariant: as a terminal table, as JSON, and as a page of Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from harness.mutants import FAMILIES, Mutant, family
from harness.mutants.catalogue import bug, bugs
from harness.mutants.runs import Trial, Verdict
from harness.workloads.lanes import catalogue

MARKS = {
    "must": ("X", "bold green", "red, and it must be"),
    "may": ("o", "green", "red as a consequence"),
    "wrong": ("!", "bold red", "red without being expected"),
    "missed": ("-", "bold red", "not red, though it must be"),
    "green": (".", "dim", "green"),
}


def mark(verdict: Verdict, invariant: str) -> str:
    """A key of `MARKS`."""
    if invariant in verdict.trial.red:
        if invariant in verdict.mutant.red:
            return "must"
        return "may" if invariant in verdict.mutant.may else "wrong"
    return "missed" if invariant in verdict.mutant.red else "green"


def table(verdicts: Sequence[Verdict], controls: Sequence[Trial]) -> Table:
    """Mutants down, invariants across; the controls, in which nothing is edited, at the end."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("mutant", no_wrap=True)
    grid.add_column("lane", no_wrap=True)
    grid.add_column("kill\n(s)", justify="right")
    for name in catalogue():
        grid.add_column("\n".join(name), no_wrap=True)
    for verdict in verdicts:
        time = verdict.time_to_kill
        cells = [MARKS[mark(verdict, name)][:2] for name in catalogue()]
        marks = [Text(sign, style=style) for sign, style in cells]
        lanes = ",".join(verdict.trial.lanes)
        grid.add_row(verdict.mutant.id, lanes, "" if time is None else f"{time:.1f}", *marks)
    for trial in controls:
        signs = [Text(*MARKS["wrong" if name in trial.red else "green"][:2]) for name in catalogue()]
        grid.add_row("(nothing edited)", ",".join(trial.lanes), "", *signs)
    return grid


def legend() -> str:
    return ", ".join(f"{sign} {meaning}" for sign, _, meaning in MARKS.values())


def faults(verdicts: Iterable[Verdict], controls: Iterable[Trial]) -> list[str]:
    """Everything that is not as it should be, a line each."""
    found = [f"{v.mutant.id}: {fault}" for v in verdicts for fault in v.faults]
    found += [f"{v.mutant.id}: {v.trial.ended.splitlines()[0]}" for v in verdicts if v.trial.ended]
    for trial in controls:
        found += [
            f"nothing edited, lane {trial.lanes[0]}: {kill.invariant} is red in {kill.test}" for kill in trial.kills
        ]
        found += [f"nothing edited, lane {trial.lanes[0]}: {trial.ended}"] if trial.ended else []
    return found


def summary(verdicts: Sequence[Verdict]) -> str:
    killed = [verdict for verdict in verdicts if verdict.killed]
    times = [verdict.time_to_kill or 0.0 for verdict in killed]
    median = f", median time to kill {statistics.median(times):.1f} s, longest {max(times):.1f} s" if times else ""
    return f"{len(killed)} of {len(verdicts)} mutants killed{median}"


def as_json(verdicts: Iterable[Verdict], controls: Iterable[Trial]) -> dict[str, Any]:
    return {
        "mutants": [
            {
                "id": verdict.mutant.id,
                "fault": verdict.mutant.fault,
                "bugs": verdict.mutant.bugs,
                "red": verdict.mutant.red,
                "may": verdict.mutant.may,
                "killed": verdict.killed,
                "time_to_kill": verdict.time_to_kill,
                "missed": verdict.missed,
                "wrong": verdict.wrong,
                "faults": verdict.faults,
                "trial": asdict(verdict.trial),
            }
            for verdict in verdicts
        ],
        "controls": [asdict(trial) for trial in controls],
    }


def page(verdicts: Sequence[Verdict], controls: Sequence[Trial]) -> str:
    """docs/zoo.md: by family, and what each invariant is good for."""
    by_id = {verdict.mutant.id: verdict for verdict in verdicts}
    lines = [
        "# The bug zoo",
        "",
        "Written by `draftproof mutants run --page docs/zoo.md`. Each mutant is a fault that real engines had, planted",
        "in the reference engine; the numbers are those of [bug-catalogue.md](bug-catalogue.md). `draftproof mutants",
        "show ID` prints the edit and the threads; [mutants.md](mutants.md) tells how to bring mutants of your own.",
        "",
        f"{summary(verdicts)}. {len(controls)} lanes ran with nothing edited: "
        f"{sum(bool(trial.kills) for trial in controls)} of them saw anything.",
        "",
        "Red first: what must turn red, then in brackets what saw the consequences.",
        "",
    ]
    for name in FAMILIES:
        mutants = [mutant for mutant in family(name) if mutant.id in by_id]
        if mutants:
            lines += [f"## {name.replace('_', ' ').capitalize()}", "", "| mutant | fault | bugs | lane | red | s |"]
            lines += ["| --- | --- | --- | --- | --- | --- |"]
            lines += [_row(mutant, by_id[mutant.id]) for mutant in mutants] + [""]
    return "\n".join([*lines, *_by_invariant(verdicts), *_by_class(verdicts)]) + "\n"


def _row(mutant: Mutant, verdict: Verdict) -> str:
    red = ", ".join(name for name in mutant.red if name in verdict.trial.red)
    more = [name for name in verdict.trial.red if name not in mutant.red]
    time = "survived" if verdict.time_to_kill is None else f"{verdict.time_to_kill:.1f}"
    fault = mutant.fault.replace("|", "\\|")
    consequences = f" ({', '.join(more)})" if more else ""
    bug_ids = ", ".join(mutant.bugs)
    return f"| `{mutant.id}` | {fault} | {bug_ids} | {verdict.trial.lanes[0]} | {red}{consequences} | {time} |"


def alone_and_first(verdicts: Iterable[Verdict]) -> Mapping[str, tuple[list[str], list[str]]]:
    """For each invariant the mutants that nothing else saw, and those of which it is the first that must turn red."""
    found: dict[str, tuple[list[str], list[str]]] = {name: ([], []) for name in catalogue()}
    for verdict in verdicts:
        red, first = verdict.trial.red, verdict.mutant.red[0]
        if len(red) == 1:
            found[red[0]][0].append(verdict.mutant.id)
        elif first in red:
            found[first][1].append(verdict.mutant.id)
    return found


def _by_invariant(verdicts: Sequence[Verdict]) -> list[str]:
    lines = ["## What each invariant is good for", "", "Mutants that it alone saw, and others of which it is the first"]
    lines += ["that must turn red.", "", "| invariant | alone | first | red at all |", "| --- | --- | --- | --- |"]
    for name, (alone, first) in alone_and_first(verdicts).items():
        number = sum(name in verdict.trial.red for verdict in verdicts)
        listed = [", ".join(f"`{one}`" for one in some) or "-" for some in (alone, first)]
        lines.append(f"| {name} | {listed[0]} | {listed[1]} | {number} |")
    return [*lines, ""]


def _by_class(verdicts: Sequence[Verdict]) -> list[str]:
    lines = ["## Classes of the catalogue", "", "| class | bugs in the catalogue | of them in the zoo |"]
    lines += ["| --- | --- | --- |"]
    stood_for = {bug_id for verdict in verdicts for bug_id in verdict.mutant.bugs}
    for name in dict.fromkeys(one.bug_class for one in bugs().values()):
        of_class = [one.id for one in bugs().values() if one.bug_class == name]
        here = [one for one in of_class if one in stood_for]
        lines.append(f"| {name} | {len(of_class)} | {len(here)}: {', '.join(here)} |")
    return lines


def describe(mutant: Mutant) -> str:
    """Everything about one mutant: the fault, the threads it was read in, where it is live, and its edits."""
    lines = [mutant.id, f"  {mutant.fault}", "", f"  lanes:  {', '.join(mutant.lanes)}"]
    lines += [f"  live:   {mutant.live}"] if mutant.live else []
    lines += [f"  red:    {', '.join(mutant.red)}"]
    lines += [f"  may:    {', '.join(mutant.may)}"] if mutant.may else []
    lines += [f"  alone:  a single request is {mutant.smoke}", "", "  stands for:"]
    for bug_id in mutant.bugs:
        known = bug(bug_id)
        lines += [f"    {known.id} {known.engine}, {known.threads}", f"         {known.symptom}"]
    for edit in mutant.edits:
        lines += ["", f"  {edit.module}"]
        lines += [f"  - {line}" for line in edit.old.strip("\n").splitlines()]
        lines += [f"  + {line}" for line in edit.new.strip("\n").splitlines()]
    return "\n".join(lines)
