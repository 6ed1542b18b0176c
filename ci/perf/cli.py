"""`draftproof perf`: gate, accept, bisect, power, profile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ci.perf.rule import Rule

app = typer.Typer(help="Performance: baselines, the gate that holds them, and who made it slow.", no_args_is_help=True)

Blocks = Annotated[
    int, typer.Option(min=8, help="Blocks of the first look (fewer cannot alarm); suspects get twice as many.")
]
Pairs = Annotated[int, typer.Option(min=1, help="Runs of each benchmark on both sources in a block.")]


def _console() -> Console:
    return Console(emoji=False, markup=False, highlight=False)


def _rule(blocks: int, pairs: int) -> Rule:
    from ci.perf.rule import Rule

    return Rule(screen_blocks=blocks, confirm_blocks=2 * blocks, pairs=pairs)


@app.command("gate")
def run_gate(
    blocks: Blocks = 16,
    pairs: Pairs = 24,
    timed: Annotated[bool, typer.Option(help="Hold timings too; --no-timed: counted figures alone.")] = True,
    baseline: Annotated[Path | None, typer.Option(help="Default: that of this machine's class.")] = None,
) -> None:
    """Hold this source against the baseline. Exits 1 on a regression, a gain that nobody accepted, a figure without an
    entry, and an entry without a figure."""
    import torch

    from ci.perf import baselines, gate, report, trees
    from ci.perf.workplace import workplace

    accepted = baselines.read(baseline or baselines.path_of(baselines.here()))
    console, rule = _console(), _rule(blocks, pairs)
    with workplace(console) as place:
        now = place.count(trees.ROOT)
        version = gate.torch_differs(accepted, torch.__version__.partition("+")[0])
        findings = list(gate.compare_counted(accepted.counted, now, version))
        console.print(f"{len(now)} counted figures: {len(findings)} differ from {accepted.commit[:12]}")
        if timed:
            base = place.source("accepted", accepted.sources)
            outcome = gate.judge_timed(place.measure(base, trees.ROOT, pairs), rule, console.print)
            measured = [timing.name for timing in outcome.timings]
            failed = [finding.name for finding in outcome.findings if finding.kind == "failed"]
            findings += outcome.findings
            findings += gate.compare_names(accepted.timed, [*measured, *failed])
            console.print(report.timings(outcome, rule))
    for finding in findings:
        typer.echo(str(finding), err=True)
    raise typer.Exit(bool(findings))


@app.command()
def accept(blocks: Blocks = 16, pairs: Pairs = 24) -> None:
    """Measure this source and make it the baseline of this machine's class. Prints every figure that changes."""
    from ci.perf import baselines, gate, rule, trees
    from ci.perf.workplace import workplace

    changed = trees.uncommitted()
    if changed:
        raise ValueError(
            f"{changed[0]} differs from HEAD: commit it first, the baseline names its source by git's hash"
        )
    runner_class = baselines.here()
    path, console = baselines.path_of(runner_class), _console()
    before = baselines.read(path) if path.is_file() else None
    with workplace(console) as place:
        counted = place.count(trees.ROOT)
        base = place.source("same", trees.hashes())
        recording = place.record(base, trees.ROOT, blocks, pairs)
        if recording.failures:
            raise ValueError("; ".join(f"{name}: {why}" for name, why in recording.failures.items()))
    timed = dict(rule.ratios(recording.blocks, gate.CONTROL))
    made = baselines.made_here(runner_class, counted, timed)
    if before is not None:
        for finding in gate.compare_counted(before.counted, counted):
            console.print(f"{finding.kind}: {finding.name}: {finding.message}")
        for name, ratio in timed.items():
            console.print(f"{name}: {before.timed.get(name, math.nan):g} -> {ratio:g} of the control's time")
    baselines.write(made, path)
    console.print(f"wrote {path}; commit it with the reason")


@app.command()
def bisect(
    good: Annotated[str, typer.Argument(help="A commit that is as fast as it should be.")],
    bad: Annotated[str, typer.Argument(help="A later one that is not.")] = "HEAD",
    figure: Annotated[str, typer.Option(help="A benchmark or a counted figure. Default: what differs most.")] = "",
    blocks: Blocks = 16,
    pairs: Pairs = 24,
) -> None:
    """Name the first bad commit between GOOD and BAD, measuring each candidate in turns with GOOD. This environment
    runs them all."""
    from ci.perf import bisect as search
    from ci.perf.workplace import workplace

    console = _console()
    commits = search.commits_between(good, bad)
    with workplace(console) as place:
        sources = search.Sources(folder=place.folder / "commits")
        stick = search.Yardstick(good=good, sources=sources, place=place, rule=_rule(blocks, pairs))
        name, size, measure = stick.what_differs(commits[-1], figure)
        console.print(f"{name}: {100 * math.expm1(size):+.1f} % at {commits[-1][:12]} against {good}")
        found = search.Search(commits=commits, measure=measure, bad=size / 2, say=console.print)
        first = found.first()
    for commit, why in found.skipped.items():
        console.print(f"{commit[:12]} could not be measured: {why}")
    console.print("first bad commit:" if len(first) == 1 else "the first bad commit is one of:")
    for commit in first:
        console.print(search.title(commit))


@app.command()
def power(
    recording: Annotated[list[Path] | None, typer.Argument(help="Timings of the same source twice: --record.")] = None,
    record: Annotated[int, typer.Option(min=0, help="Record so many blocks first, into --out.")] = 0,
    out: Annotated[Path, typer.Option(help="Where to.")] = Path("build/timings.json"),
    runs: Annotated[int, typer.Option(min=100, help="Simulated gate runs.")] = 20_000,
    real: Annotated[int, typer.Option(min=0, help="Real gate runs with the same source twice, too.")] = 0,
    planted: Annotated[float, typer.Option(min=0, help="In real runs: percent that every engine step is slower.")] = 0,
    blocks: Blocks = 16,
    pairs: Pairs = 24,
) -> None:
    """False alarms and power of the gate on this machine, and the repeats that it takes. Exits 1 when more false alarms
    or fewer slowdowns are seen than docs/perf.md promises."""
    from ci.perf import experiments, report, timed
    from ci.perf.workplace import workplace

    console, rule = _console(), _rule(blocks, pairs)
    files = list(recording or ())
    fine = True
    if record or real:
        with workplace(console) as place:
            if record:
                files.append(experiments.record(place, record, pairs, out))
            if real:
                fine &= experiments.real(place, rule, real, planted / 100, console.print)
    if files:
        blocks_of = [block for file in files for block in timed.read(file).blocks]
        console.print(report.clocks(blocks_of))
        table, promised = report.power(blocks_of, rule, runs)
        console.print(table)
        fine &= promised
    elif not real:
        raise ValueError("give recordings, or --record BLOCKS, or --real RUNS")
    raise typer.Exit(not fine)


@app.command()
def profile(
    lane: Annotated[str, typer.Option(help="Drafter lane; none: without speculation.")] = "none",
    checkpoint: Annotated[str, typer.Option(help="One of ci/perf/checkpoints.py.")] = "random",
    batch: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Of each request.")] = 64,
    top: Annotated[int, typer.Option(min=1, help="Rows of each table.")] = 15,
) -> None:
    """Where the time of the reference engine goes: Python functions by their own time, and torch's operators."""
    from ci.perf import profiling

    _console().print(profiling.tables(checkpoint, lane, batch, tokens, top))
