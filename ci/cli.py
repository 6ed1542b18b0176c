"""`draftproof ci`: what runs where, and what this machine can run."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ci import runners
from ci.register_runner import register_runner

app = typer.Typer(help="Runner classes, the plan of suites, and the workflows made from them.", no_args_is_help=True)
app.command("register-runner")(register_runner)


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
            "GPUs": "\n".join(
                f"{one.name}, {one.architecture}, {one.memory_bytes / GIB:.1f} GiB" for one in machine.gpus
            ),
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
