"""The `draftproof` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ci.campaign import campaign
from ci.cli import app as ci
from ci.perf.cli import app as perf
from harness.engines.cli import app as engines
from harness.mutants.cli import app as mutants
from harness.report.places import require_folder, write_whole
from harness.trained.cli import app as models

app = typer.Typer(
    name="draftproof",
    help="Is this engine's speculative decoding lossless? Ask it, invariant by invariant and drafter by drafter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
known_answer = typer.Typer(help="Checkpoints whose answers are known in closed form.", no_args_is_help=True)
app.add_typer(known_answer, name="known-answer")
app.add_typer(engines, name="engines")
app.add_typer(mutants, name="mutants")
app.add_typer(models, name="models")
app.add_typer(ci, name="ci")
app.command("campaign")(campaign)
app.add_typer(perf, name="perf")

ROOT = Path(__file__).resolve().parents[1]
SUITE = ROOT / "suites" / "conformance"


@app.command()
def run(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME, NAME@VERSION, or module:factory of your adapter; repeatable: they are compared. "
            "Default: reference."
        ),
    ] = None,
    engine_python: Annotated[
        Path | None, typer.Option(help="Python of an environment of your own that has the engine.")
    ] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Only this drafter lane; repeatable.")] = None,
    invariant: Annotated[
        list[str] | None,
        typer.Option(
            help="Only the tests of this invariant, and of the scorecard its cells alone; repeatable. What these tests "
            "find broken beside it is shown, too."
        ),
    ] = None,
    tier: Annotated[str, typer.Option(help="fast, or full: more examples and long sweeps.")] = "fast",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds each seeded scenario runs with.")] = 1,
    kernels: Annotated[str, typer.Option(help="auto, torch or triton: what computes the reference engine.")] = "auto",
    workers: Annotated[str, typer.Option(help="Worker processes: a number, or auto.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for scorecard.json and junit.xml.")] = ROOT / "build",
    record: Annotated[Path | None, typer.Option(help="Write every run there, to be checked elsewhere.")] = None,
    explained: Annotated[
        bool, typer.Option("--explained", help="Fail on what ci/findings.toml does not explain, and on that alone.")
    ] = False,
) -> None:
    """Run the conformance suite. Exits non-zero when a cell fails, errs or stayed empty; 130 when interrupted.

    The files replace those of an earlier run in --out, also where --drafter or --invariant ask for a part of it.
    """
    from harness.report.session import INTERRUPTED, Interrupted, run_all, run_one

    if kernels not in ("auto", "torch", "triton"):
        raise typer.BadParameter(f"--kernels {kernels}: must be auto, torch or triton")
    if workers != "auto" and not workers.isdecimal():
        raise typer.BadParameter(f"--workers {workers}: must be a number, 0 for none beside this process, or auto")
    require_folder("--out", out)
    # An adapter may lie where the command is run.
    sys.path.insert(0, str(Path.cwd()))
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *inherited])
    arguments = [str(SUITE), f"--rootdir={ROOT}", "--tier", tier, "--seeds", str(seeds), "--kernels", kernels]
    arguments += ["--record", str(record)] if record is not None else []
    arguments += ["-q", "-n", workers] if workers != "0" else ["-q"]
    for option, values in (("--drafter", drafter), ("--invariant", invariant)):
        for value in values or ():
            arguments += [option, value]
    names = _named(engine or ["reference"], engine_python)
    try:
        code, differ = run_all(names, arguments, out) if len(names) > 1 else (run_one(names[0], arguments, out), "")
    except Interrupted as interrupted:
        typer.echo(str(interrupted), err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(differ, nl=False)
    raise typer.Exit(_unexplained(names, out) if explained and code in (0, 1) else code)


def _named(engines: list[str], python: Path | None) -> list[str]:
    """NAME@PATH for an environment of the user's own."""
    if python is None:
        return engines
    if len(engines) > 1 or "@" in engines[0]:
        raise typer.BadParameter(f"--engine-python goes with one --engine and no version, not {', '.join(engines)}")
    return [f"{engines[0]}@{python.absolute()}"]


def _unexplained(engines: list[str], out: Path) -> int:
    """Print what no finding explains -> the exit code."""
    import json

    from harness.engines import version_of
    from harness.report.findings import objections, read

    cells, known, found = json.loads((out / "scorecard.json").read_text(encoding="utf-8")), read(), []
    for engine in engines:
        mine = [cell for cell in cells if cell["engine"] == engine]
        found += objections(mine, known, engine, version_of(engine))
    for line in found or ["every red cell is explained in docs/findings.md"]:
        typer.echo(line)
    return int(bool(found))


@app.command()
def invariants() -> None:
    """List the catalogue: id, the observations that each invariant needs, and its statement."""
    from harness.invariants import INVARIANTS
    from harness.report.table import show
    from harness.workloads.lanes import AT_THE_DOOR, catalogue

    table = Table("id", "needs", "statement", box=None, pad_edge=False)
    for name in catalogue():
        if name in AT_THE_DOOR:
            table.add_row(name, "start-up", escape(AT_THE_DOOR[name]))
        else:
            table.add_row(name, ", ".join(sorted(INVARIANTS[name].needs)), escape(INVARIANTS[name].statement))
    show(table)


@app.command()
def kernels(
    kernel: Annotated[list[str] | None, typer.Option(help="Only this kernel; repeatable. Default: all.")] = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Compile for every target; no GPU is needed.")] = False,
) -> None:
    """List the Triton kernels, or compile them: registers / spills / shared memory (bytes) of every binary. Exits
    non-zero when one does not compile, or spills more than it accounts for."""
    from harness.report import kernels as tables
    from harness.report.table import show

    tables.require_triton()
    names = tables.chosen(kernel or ())
    if not compile_:
        show(tables.catalogue(names))
        return
    table, objections = tables.compiled(names, os.cpu_count() or 1)
    show(table)
    for objection in objections:
        typer.echo(objection, err=True)
    raise typer.Exit(1 if objections else 0)


@app.command()
def matrix(
    engine: Annotated[str, typer.Option(help="Registered name, or module:factory of your adapter.")] = "reference",
    drafter: Annotated[list[str] | None, typer.Option(help="Only this drafter lane; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page there instead of printing it.")] = None,
) -> None:
    """Ask for every feature on every drafter. Exits non-zero when a cell neither passes nor is refused."""
    from harness.report import matrix as pages

    if out is not None:
        require_folder("--out", out.parent)
    rows = pages.run(engine, drafter or ())
    text = pages.page(engine, rows)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_whole(out, text)
        typer.echo(f"written: {out}")
    raise typer.Exit(any(cell.status == "fail" for cells in rows.values() for cell in cells.values()))


@app.command()
def soak(
    engine: Annotated[str, typer.Option(help="Registered name, or module:factory of your adapter.")] = "reference",
    drafter: Annotated[str, typer.Option(help="Drafter lane.")] = "EAGLE",
    steps: Annotated[int, typer.Option(min=1, help="Stop after the round in which so many steps are over.")] = 5000,
    every: Annotated[int, typer.Option(min=1, help="Print one round in so many.")] = 10,
) -> None:
    """Replay prompts among cancels and retries on one engine. Exits non-zero at the first drift or violation."""
    from harness.report.soak import watch

    raise typer.Exit(watch(engine, drafter, steps, every))


@app.command()
def check(
    trace: Annotated[list[Path], typer.Argument(help="Folders with recorded runs: docs/trace.md.")],
    baseline: Annotated[Path | None, typer.Option(help="The same requests without speculation, recorded.")] = None,
    family: Annotated[str, typer.Option(help="Known-answer family that ran; with --drafter.")] = "",
    drafter: Annotated[str, typer.Option(help="Drafter lane whose closed form the drafts had; with --family.")] = "",
) -> None:
    """Hold recorded runs against every invariant that they offer observations for, without the engine. Exits 1 when one
    is broken, 2 when a file is no trace."""
    from harness.report.traces import judged

    broken = False
    for folder in trace:
        report, fine = judged(folder, baseline, family, drafter)
        typer.echo(report)
        broken |= not fine
    raise typer.Exit(broken)


@app.command()
def report(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[INPUT]...",
            help="Files, or folders of them: scorecard.json, recorded runs, the JSON of mutants run, "
            "of pytest-benchmark, of ci/baselines, junit.xml. Default: build/scorecard.json.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = ROOT / "build" / "report.html",
    title: Annotated[str, typer.Option(help="Its title.")] = "Draftproof report",
    family: Annotated[
        str, typer.Option(help="Known-answer family of the recorded runs. Default: as their target's folder is called.")
    ] = "",
) -> None:
    """Write one self-contained HTML page of all that was found. Exits 2 when a file cannot be read."""
    from datetime import UTC, datetime

    from harness.known_answer import FAMILIES
    from harness.report import page

    if family and family not in FAMILIES:
        raise typer.BadParameter(f"--family {family}: must be one of {', '.join(FAMILIES)}")
    console = Console(stderr=True)
    with console.status("reading") as status:
        found = page.read(
            inputs or [ROOT / "build" / "scorecard.json"], family, lambda path: status.update(f"reading {path.name}")
        )
    text = page.page(found, title, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    write_whole(out, text)
    typer.echo(f"{out}: {len(text.encode()) / 1000:.0f} kB from {len(found.sources)} files")


@known_answer.command("build")
def build_known_answer(
    directory: Annotated[Path, typer.Argument(help="Created when missing; one folder per family.")],
    family: Annotated[list[str] | None, typer.Option(help="Only this family; repeatable. Default: all.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16: how the weights are stored.")] = "float32",
) -> None:
    """Write known-answer checkpoints, targets and drafters, in Hugging Face format."""
    from harness.known_answer import build

    for path in build(directory, family or (), dtype):
        typer.echo(str(path))


def main() -> None:
    """Entry point. Wrong input, and files that cannot be read or written, end in one line on stderr and exit code 2."""
    try:
        app()
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        typer.echo(f"error: {named}; mend that, or name another place", err=True)
    else:
        return
    sys.exit(2)
