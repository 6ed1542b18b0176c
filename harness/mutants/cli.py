"""`draftproof mutants`: list, show, run, general."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from harness.report.places import require_folder, write_whole

if TYPE_CHECKING:
    from harness.mutants import Mutant
    from harness.mutants.survey import Finding

app = typer.Typer(help="The bug zoo: historical faults that the checks must see.", no_args_is_help=True)

From = Annotated[
    Path | None, typer.Option("--from", help="Take the mutants from this folder instead; see docs/mutants.md.")
]


def _mutants(folder: Path | None, names: list[str] | None = None) -> dict[str, Mutant]:
    from harness import mutants

    known = mutants.zoo() if folder is None else mutants.from_folder(folder)
    for name in names or ():
        if name not in known:
            raise ValueError(f"{name}: there is no mutant of that id; `draftproof mutants list` names them")
    return {name: known[name] for name in names} if names else known


@app.command("list")
def list_mutants(folder: From = None) -> None:
    """One mutant a line: id, the bugs it stands for, what must turn red, and its lanes."""
    from rich.table import Table

    from harness.report.table import show

    table = Table("mutant", "stands for", "turns red", "on lanes", box=None, pad_edge=False)
    for mutant in _mutants(folder).values():
        table.add_row(mutant.id, *(",".join(words) for words in (mutant.bugs, mutant.red, mutant.lanes)))
    show(table)


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="ID")], folder: From = None) -> None:
    """The fault, the public threads that it stands for, and the edit that plants it."""
    from harness.report import zoo

    typer.echo(zoo.describe(_mutants(folder, [name])[name]))


@app.command()
def run(
    names: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Default: all.")] = None,
    folder: From = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes at once. Default: one per core.")] = None,
    others: Annotated[int, typer.Option(min=0, help="Tests of each invariant that is not expected to see it.")] = 1,
    whole: Annotated[bool, typer.Option("--whole", help="Every test of every invariant, expected or not.")] = False,
    all_lanes: Annotated[bool, typer.Option("--all-lanes", help="On every lane where it is live.")] = False,
    control: Annotated[bool, typer.Option(help="Also run the lanes with nothing edited.")] = True,
    out: Annotated[Path | None, typer.Option("--json", help="Write everything there.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write the page there.")] = None,
) -> None:
    """Plant each fault in a fresh process and run the suites' checks. Exits non-zero when a mutant survives, an
    invariant is red that is not among the expected, or anything is red with nothing edited."""
    from harness.mutants.runs import Laboratory
    from harness.report import zoo

    mutants = _mutants(folder, names)
    for option, file in (("--json", out), ("--page", page)):
        if file is not None:
            require_folder(option, file.parent)
    laboratory = Laboratory(workers)
    wishes = {"others": None if whole else others}
    progress = Console(stderr=True)
    verdicts, controls = [], []
    for verdict in laboratory.run(mutants.values(), all_lanes=all_lanes, **wishes):
        verdicts.append(verdict)
        time = "survived" if verdict.time_to_kill is None else f"{verdict.time_to_kill:.1f} s"
        progress.print(f"{len(verdicts)}/{len(mutants)} {verdict.mutant.id}: {time}", highlight=False)
    if control:
        lanes = dict.fromkeys(lane for verdict in verdicts for lane in verdict.trial.lanes)
        orders = {lane: laboratory.control([lane], **wishes) for lane in lanes}
        controls = list(laboratory.trials(orders))
    verdicts.sort(key=lambda verdict: list(mutants).index(verdict.mutant.id))
    console = Console(width=max(Console().width, 160))
    console.print(zoo.table(verdicts, controls))
    console.print(zoo.legend(), highlight=False)
    for fault in zoo.faults(verdicts, controls):
        console.print(f"[bold red]![/] {fault}", highlight=False)
    console.print(zoo.summary(verdicts), highlight=False)
    if out is not None:
        write_whole(out, json.dumps(zoo.as_json(verdicts, controls), indent=1) + "\n")
    if page is not None:
        write_whole(page, zoo.page(verdicts, controls))
    raise typer.Exit(1 if zoo.faults(verdicts, controls) else 0)


@app.command()
def general(
    family: Annotated[
        list[str] | None, typer.Option(help="verification, output, scheduling, kernels; repeatable.")
    ] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Only so many of each family, drawn with --seed.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    match: Annotated[str, typer.Option(help="Only changes whose id holds this text.")] = "",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes at once. Default: one per core.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write every finding there.")] = None,
) -> None:
    """Mutate without imagination: comparison, logic, off-by-one, dropped copy, swapped index, removed call. Exits
    non-zero when a change survives that is not known to be equivalent."""
    from rich.table import Table

    from harness.mutants import survey
    from harness.mutants.runs import Laboratory

    laboratory = Laboratory(workers)
    table = Table("family", "operator", "killed", "survived", "equivalent", "share of the others killed", box=None)
    findings: list[Finding] = []
    for name in family or survey.families():
        mine: list[Finding] = []
        for finding in survey.survey(laboratory, name, sample=sample, seed=seed, match=match):
            mine.append(finding)
            if out is not None:
                _write(out, [*findings, *mine])
            if not finding.killer and not finding.reason:
                typer.echo(f"SURVIVED line {finding.change.line} of {finding.change.id}")
            elif finding.killer and len(mine) % 20 == 0:
                typer.echo(f"{name}: {len(mine)} tried", err=True)
        findings += mine
        rows = [*survey.shares(mine).items(), ("all", survey.total(mine))]
        for operator, (killed, survived, equivalent) in rows:
            share = f"{killed / (killed + survived):.1%}" if killed + survived else ""
            table.add_row(name, operator, str(killed), str(survived), str(equivalent), share)
    Console(width=max(Console().width, 100)).print(table)
    raise typer.Exit(any(not one.killer and not one.reason for one in findings))


def _write(out: Path, findings: Sequence[Finding]) -> None:
    """After each finding: a survey takes hours."""
    told = [
        {"family": one.family, "id": one.change.id, "line": one.change.line, "killer": one.killer, "reason": one.reason}
        for one in findings
    ]
    write_whole(out, json.dumps(told, indent=1) + "\n")
