"""`draftproof models`: tiny models that were trained on text, and what their drafters are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]

app = typer.Typer(help="Tiny models that were trained on text, for acceptance as it really is.", no_args_is_help=True)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, log and checksums.")] = ROOT / "build" / "trained",
) -> None:
    """Train the target and its drafters anew. Interrupted, the same command goes on where it was."""
    from harness.trained.plan import FURTHER
    from harness.trained.train import train as run

    told = TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[losses]}")
    with Progress(*told, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        tasks = {stage: progress.add_task(stage, total=None, losses="") for stage in ("target", "drafters", *FURTHER)}

        def on_step(stage: str, done: int, steps: int, losses: dict[str, float]) -> None:
            shown = " ".join(f"{name} {loss:.2f}" for name, loss in losses.items())
            progress.update(tasks[stage], completed=done, total=steps, losses=shown)

        run(out, on_step=on_step)
    typer.echo(f"{out}: done; `draftproof models check --root {out}` measures them")


@app.command()
def check(
    engine: Annotated[str, typer.Option(help="NAME, NAME@VERSION, or NAME@PATH of a Python.")] = "reference",
    drafter: Annotated[list[str] | None, typer.Option(help="standalone, eagle, eagle3 or mtp; repeatable.")] = None,
    root: Annotated[Path | None, typer.Option(help="Folder with checkpoints. Default: the committed.")] = None,
    number: Annotated[int, typer.Option("--prompts", min=1, help="How many held-out prompts.")] = 40,
) -> None:
    """Hold files against their checksums, and count accept lengths on held-out prompts: greedy, chains of 3. Exits
    non-zero when a file is damaged or a drafter falls short."""
    from harness.trained import checkpoints
    from harness.trained.measure import LEAST, measure, requests

    root = root or checkpoints.WEIGHTS
    for name in drafter or ():
        if name not in LEAST:
            raise typer.BadParameter(f"--drafter {name}: must be one of {', '.join(LEAST)}")
    faults = [f"{name}: not as {checkpoints.SUMS} says" for name in checkpoints.damaged(root)]
    table = Table("drafter", "accept length", "at least", "verify steps", "tokens", "accepted by position", box=None)
    asked = requests(number)
    for name in drafter or LEAST:
        found = measure(name, asked, engine=engine, root=root)
        seen = found.counters
        positions = " ".join(f"{count / seen.num_drafts:.3f}" for count in seen.accepted_per_position)
        table.add_row(
            name, f"{found.accept_len:.3f}", str(LEAST[name]), str(seen.num_drafts), str(found.tokens), positions
        )
        if found.accept_len < LEAST[name]:
            faults.append(f"{name}: accept length {found.accept_len:.3f} is below {LEAST[name]}")
    Console().print(table)
    for fault in faults:
        typer.echo(fault, err=True)
    raise typer.Exit(1 if faults else 0)
