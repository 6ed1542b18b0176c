"""`draftproof engines`: what can be tested here, what is missing, and how to get it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from harness.engines import ENGINES, engine_factory, recipes
from harness.engines.environments import Recipe, doctor, install, newest, version_of
from harness.engines.server_file import presets
from harness.report.table import show

app = typer.Typer(help="Engines that can be tested.", no_args_is_help=True)


@app.command("list")
def list_engines() -> None:
    """List the engines that have an adapter, and the versions of them that are installed."""
    table = Table("engine", "tested with", "installed", box=None, pad_edge=False)
    found = recipes()
    for name in sorted(ENGINES):
        if name in found:
            own = ["in this environment"] if found[name].here else []
            table.add_row(name, found[name].version, ", ".join([*own, *found[name].installed()]) or "-")
        elif ENGINES[name].isolated:
            table.add_row(name, "", ", ".join(f"{name}@{server}" for server in presets()) + f", or {name}@FILE.toml")
        else:
            table.add_row(name, "", "in this environment")
    show(table)


@app.command("doctor")
def examine(
    name: Annotated[str, typer.Argument(help="NAME, NAME@VERSION, NAME@PATH of a Python, or openai@SERVER.")],
) -> None:
    """Say what keeps an engine from being tested here, and the command that mends it. Exits 1 when something does."""
    engine, _, where = name.partition("@")
    recipe = _recipe(engine)
    if recipe is None:
        try:
            engine_factory(name)
        except ValueError as error:
            typer.echo(str(error))
            raise typer.Exit(1) from error
        where_from = "is ready" if ENGINES[engine].isolated else "runs in this environment: nothing is missing"
        typer.echo(f"{name} {where_from}")
        return
    ailments = list(doctor(recipe, where))
    for ailment in ailments:
        typer.echo(f"{ailment.what}\n  mend: {ailment.mend}")
    if ailments:
        raise typer.Exit(1)
    python = recipe.python(where)
    typer.echo(f"{engine} {version_of(recipe, python)} is ready: {python}")


@app.command("install")
def install_engine(
    name: Annotated[str, typer.Argument(help="NAME of the engine.")],
    version: Annotated[str, typer.Argument(help="Default: the version that it is tested with.")] = "",
) -> None:
    """Make an environment for a version of an engine, in .engines/NAME-VERSION."""
    recipe = _recipe(name)
    if recipe is None:
        typer.echo(f"{name} has no environment of its own: there is nothing to install")
        return
    try:
        install(recipe, version or recipe.version, typer.echo)
    except RuntimeError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@app.command("newest")
def newest_version(
    name: Annotated[str, typer.Argument(help="NAME of an engine with environments of its own.")],
) -> None:
    """Print the newest version of an engine that the package index has for this machine."""
    recipe = _recipe(name)
    if recipe is None:
        raise typer.BadParameter(f"{name} has no environment of its own, but the version that there is")
    try:
        typer.echo(newest(recipe))
    except RuntimeError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _recipe(name: str) -> Recipe | None:
    if name not in ENGINES:
        raise typer.BadParameter(f"{name}: there is no such engine; choose from {', '.join(sorted(ENGINES))}")
    return recipes().get(name)
