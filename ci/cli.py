"""`draftproof ci`: what runs where, and what this machine can run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ci import registry, runners, shards, stages

app = typer.Typer(help="Runner classes, the plan of suites, and the workflows made from them.", no_args_is_help=True)


@app.command("doctor")
def examine(
    require: Annotated[list[str] | None, typer.Option(help="Exit 1 unless it is of this class; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what this machine is, which classes of ci/runners.toml it satisfies, and why not the others."""
    from ci.doctor import GIB, detect, unmet

    classes = runners.load()
    for name in require or ():
        if name not in classes:
            raise typer.BadParameter(f"--require {name}: must be one of {', '.join(classes)}")
    machine = detect()
    reasons = {name: unmet(machine, one) for name, one in classes.items()}
    if as_json:
        typer.echo(json.dumps({**asdict(machine), "classes": {name: not why for name, why in reasons.items()}}))
    else:
        gpus = [f"{one.name}, {one.architecture}, {one.memory_bytes / GIB:.1f} GiB" for one in machine.gpus]
        facts = {
            "machine": f"{machine.system} {machine.processor}, {machine.cpus} CPUs",
            "GPUs": "\n".join(gpus),
            "driver": machine.driver,
            "torch": f"{machine.torch} for {machine.cuda}" if machine.cuda else machine.torch,
            "triton": machine.triton,
            "trouble": machine.trouble,
        }
        _print_pairs({name: fact or "-" for name, fact in facts.items()})
        _print_pairs({name: "\n".join(why) or f"yes ({classes[name].title})" for name, why in reasons.items()})
    raise typer.Exit(any(reasons[name] for name in require or ()))


def _print_pairs(pairs: dict[str, str]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name, text in pairs.items():
        table.add_row(name, text)
    Console(emoji=False, markup=False, highlight=False).print(table)


@app.command()
def plan(
    stage: Annotated[str, typer.Option(help="Only this stage of ci/stages.toml.")] = "",
    needs: Annotated[str, typer.Option(help="Only what needs this class of ci/runners.toml.")] = "",
    count: Annotated[int, typer.Option("--shards", min=0, help="So many shards; 0: as the time limits ask for.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the files of every shard as JSON.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Print only what is wrong.")] = False,
) -> None:
    """Spread the registered suites over jobs. Exits 2 when one is not registered as it must be, or does not fit."""
    known = stages.load()
    for what, name, there in (("stage", stage, known), ("needs", needs, runners.load())):
        if name and name not in there:
            raise typer.BadParameter(f"--{what} {name}: must be one of {', '.join(there)}")
    found = [
        group
        for group in shards.groups(registry.must_read(), known, count)
        if stage in ("", group.stage) and needs in ("", group.needs)
    ]
    if as_json:
        typer.echo(json.dumps([asdict(group) for group in found], indent=1))
        return
    if check:
        return
    table = Table("stage", "needs", "shard", "files", "seconds", "of", box=None, pad_edge=False)
    for group in found:
        capacity = f"{known[group.stage].capacity:g}"
        for number, files in enumerate(group.shards, start=1):
            place = f"{number}/{len(group.shards)}"
            table.add_row(group.stage, group.needs, place, str(len(files)), f"{group.load(files):.0f}", capacity)
    Console(emoji=False, markup=False, highlight=False).print(table)


@app.command("refresh")
def refresh_estimates(
    times: Annotated[list[Path], typer.Argument(help="JUnit files of a run, or JSON objects of seconds by file.")],
    stage: Annotated[str, typer.Option(help="The stage that was run.")] = "cpu",
    check: Annotated[bool, typer.Option("--check", help="Rewrite nothing; exit 1 on estimates that are off.")] = False,
) -> None:
    """Rewrite the seconds of the registered suites from measured times, and say which were off by a factor of two."""
    from ci import refresh

    if stage not in stages.load():
        raise typer.BadParameter(f"--stage {stage}: must be one of {', '.join(stages.load())}")
    registrations = registry.must_read()
    found = refresh.changes(registrations, refresh.measured(times), stage)
    for change in found:
        if change.reported:
            typer.echo(f"off by {change.factor:.1f}: {change}")
    if check:
        raise typer.Exit(any(change.reported for change in found))
    refresh.rewrite(found)
    typer.echo(f"{len(found)} of {sum(one.stage == stage for one in registrations)} estimates rewritten")


@app.command("render")
def render_workflows(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when a file has drifted.")] = False,
    folder: Annotated[Path, typer.Option(help="Where the files go.")] = registry.ROOT / ".github",
) -> None:
    """Write the workflows in .github from the registered suites, the stages and the runner classes."""
    from ci import render

    texts = render.rendered()
    changed = render.drifted(texts, folder) if check else render.write(texts, folder)
    for name in changed:
        typer.echo(f"{name} is not as it would be rendered: draftproof ci render" if check else f"rendered {name}")
    raise typer.Exit(check and bool(changed))
