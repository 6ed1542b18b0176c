"""`draftproof campaign`: property tests with many seeds, on many workers."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from ci.campaign_plugin import FAILURES, RUNNING, SUMMARY
from ci.campaign_state import Campaign, Failure, Scope, Task, opened, read_failures, write
from ci.campaign_workers import WORKER_PID, Answer, Order, Workers, started

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "campaign"
SUITE = ROOT / "suites" / "conformance"
PASSED, FAILED, NOTHING_COLLECTED = 0, 1, 5
TAIL = 2000
"""Characters of a broken run's output that are told."""
SHARED = "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`attempts`: how often a seed is given to a worker before it counts as broken. `seconds` that each may take."""

    scope: Scope
    examples: str
    environment: Mapping[str, str]
    out: Path
    attempts: int
    seconds: float
    parallel: int


def campaign(
    seeds: Annotated[str, typer.Option(help="A:B, without B; or A alone.")],
    engine: Annotated[
        list[str] | None, typer.Option(help="NAME, NAME@VERSION, or module:factory of your adapter; repeatable.")
    ] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Only this drafter lane; repeatable.")] = None,
    invariant: Annotated[list[str] | None, typer.Option(help="Only this invariant; repeatable.")] = None,
    tier: Annotated[str, typer.Option(help="full, or fast: few examples for each seed.")] = "full",
    suite: Annotated[
        list[Path] | None, typer.Option(help="Property tests to run; repeatable. Default: suites/conformance.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="How many seeds run at a time.")] = os.cpu_count() or 1,
    address: Annotated[str, typer.Option(help="A Ray cluster that runs already. Default: this machine.")] = "",
    gpus: Annotated[float, typer.Option(min=0, help="GPUs that a seed takes, as Ray counts them.")] = 0.0,
    examples: Annotated[
        Path | None, typer.Option(help="Folder of failing examples that all share. Default: one in --out.")
    ] = None,
    redis: Annotated[str, typer.Option(help="redis://HOST:PORT/NUMBER that they share instead.")] = "",
    attempts: Annotated[int, typer.Option(min=1, help="How often a seed is begun whose worker is lost.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="How long a seed may take.")] = 3600.0,
    out: Annotated[Path, typer.Option(help="Folder for campaign.json; given again, it goes on.")] = BUILD,
) -> None:
    """Run the property tests with every seed on every engine, spread over Ray workers. Exits 1 when something was
    found, 2 when a seed could not be done."""
    wanted = seed_range(seeds)
    out = out.absolute()
    plan = Plan(
        scope=Scope(
            suites=tuple(str(one.absolute()) for one in suite or [SUITE]),
            drafters=tuple(drafter or ()),
            invariants=tuple(invariant or ()),
            tier=tier,
        ),
        examples=_shared(examples, redis, out),
        environment=_environment(),
        out=out,
        attempts=attempts,
        seconds=seconds,
        parallel=workers,
    )
    with opened(out, plan.scope) as found:
        run = Run(plan, found, typer.echo)
        run.sweep()
        tasks = found.missing(engine or ["reference"], wanted)
        if tasks:
            with started(workers, address, gpus) as staff:
                run.all(tasks, staff)
        code = summarise(found, out)
    raise typer.Exit(code)


def seed_range(text: str) -> range:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise ValueError(f"--seeds {text}: must be A:B with whole numbers, or A")
    first = int(match[1])
    found = range(first, int(match[2]) if match[2] else first + 1)
    if not found:
        raise ValueError(f"--seeds {text}: holds no seed; B must be greater than A")
    return found


def _shared(folder: Path | None, url: str, out: Path) -> str:
    from harness.report.examples import checked

    if folder is not None and url:
        raise ValueError("give either --examples or --redis")
    if url and "://" not in url:
        raise ValueError(f"--redis {url}: must be redis://HOST:PORT/NUMBER")
    return checked(url) if url else str((folder or out / SHARED).absolute())


def _environment() -> dict[str, str]:
    """An adapter may lie where the command is run."""
    paths = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@dataclass(slots=True)
class Run:
    plan: Plan
    campaign: Campaign
    tell: Callable[[str], None]
    begun: dict[str, float] = field(default_factory=dict)

    def all(self, tasks: Sequence[tuple[str, int]], workers: Workers) -> None:
        """Keep the workers busy until every task is done or given up."""
        waiting = deque((engine, seed, 1) for engine, seed in tasks)
        names: dict[str, tuple[str, int, int]] = {}
        while waiting or len(workers):
            while waiting and len(workers) < self.plan.parallel:
                engine, seed, attempt = waiting.popleft()
                name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', engine)}-{seed}-{attempt}"
                names[name] = (engine, seed, attempt)
                self.begun[name] = time.monotonic()
                workers.give(name, self.order(engine, seed, self.folder(name)))
            for name, answer in workers.answers():
                engine, seed, attempt = names[name]
                if not self.take(engine, seed, attempt, name, answer):
                    waiting.append((engine, seed, attempt + 1))

    def folder(self, name: str) -> Path:
        """Empty: an attempt of that name may have been cut off."""
        folder = self.plan.out / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def order(self, engine: str, seed: int, folder: Path) -> Order:
        scope = self.plan.scope
        words = [sys.executable, "-m", "pytest", *scope.suites, "-m", "hypothesis", "-q", "-p", "no:cacheprovider"]
        words += ["-p", "ci.campaign_plugin", "--run-folder", str(folder), "--worker-pid", WORKER_PID]
        words += ["--engine", engine, f"--hypothesis-seed={seed}", "--tier", scope.tier]
        words += ["--examples", self.plan.examples, "--scorecard", str(folder / "scorecard.json")]
        for option, values in (("--drafter", scope.drafters), ("--invariant", scope.invariants)):
            words += [word for value in values for word in (option, value)]
        return Order(tuple(words), str(ROOT), self.plan.environment, str(folder / "output.txt"), self.plan.seconds)

    def take(self, engine: str, seed: int, attempt: int, name: str, answer: Answer) -> bool:
        """Write down what came of it -> whether the task is over."""
        folder = self.plan.out / "runs" / name
        failures = read_failures(folder / FAILURES)
        trouble = self._trouble(answer, folder)
        if answer.code is not None and answer.code < 0:
            failures += _crash(engine, seed, folder, trouble)
        self._add(failures)
        over = not trouble or attempt >= self.plan.attempts
        if over:
            task = Task(
                engine=engine,
                seed=seed,
                status="broken" if trouble else "failed" if failures else "passed",
                attempts=attempt,
                examples=_examples(folder),
                seconds=round(time.monotonic() - self.begun[name], 1),
                note=trouble,
            )
            self.campaign.tasks[task.key] = task
        if trouble:
            then = "given up" if over else "begun again"
            self.tell(f"{engine} seed {seed}: {trouble.partition(chr(10))[0]}; {then}")
        write(self.plan.out, self.campaign)
        # Failures keep their folder: an engine of its own process leaves its reproducers there.
        if not failures and not trouble:
            shutil.rmtree(folder, ignore_errors=True)
        return over

    def sweep(self) -> None:
        """What runs wrote that nobody was left to read."""
        for path in sorted((self.plan.out / "runs").glob(f"*/{FAILURES}")):
            self._add(read_failures(path))
        write(self.plan.out, self.campaign)

    def _add(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            if self.campaign.add(failure):
                names = ", ".join(failure.invariants) or failure.test
                self.tell(f"found {failure.key}: {names}: {failure.message.partition(chr(10))[0]}")

    @staticmethod
    def _trouble(answer: Answer, folder: Path) -> str:
        """Why a task is not done, empty when it is."""
        if answer.code is None:
            return f"its worker was lost: {answer.lost}"
        if answer.code in (PASSED, FAILED):
            return ""
        path = folder / "output.txt"
        tail = path.read_text(encoding="utf-8", errors="replace")[-TAIL:].strip() if path.exists() else ""
        if answer.code == NOTHING_COLLECTED:
            return f"no property test was collected\n{tail}"
        what = f"ended by signal {-answer.code}" if answer.code < 0 else f"pytest ended with exit code {answer.code}"
        return f"{what}\n{tail}"


def _crash(engine: str, seed: int, folder: Path, trouble: str) -> list[Failure]:
    """The test in which the process ended, where one had begun."""
    path = folder / RUNNING
    if not path.exists():
        return []
    nodeid = json.loads(path.read_text(encoding="utf-8"))
    message = f"the process of the test was {trouble.partition(chr(10))[0]}"
    test = nodeid.partition("[")[0]
    return [Failure(engine=engine, invariants=(), drafter="-", test=test, message=message, seed=seed)]


def _examples(folder: Path) -> int:
    path = folder / SUMMARY
    return int(msgspec.json.decode(path.read_bytes())["examples"]) if path.exists() else 0


def summarise(campaign: Campaign, out: Path) -> int:
    """Print what was found -> the exit code."""
    console = Console(emoji=False, markup=False, highlight=False, soft_wrap=True)
    tasks = list(campaign.tasks.values())
    broken = [task for task in tasks if task.status == "broken"]
    if campaign.findings:
        console.print(_table(campaign))
    for key, finding in sorted(campaign.findings.items()):
        console.print(f"\n{key}: {finding.first.message}")
        console.print("\n".join(filter(None, [finding.first.example, finding.first.reproduce])))
    for task in broken:
        console.print(f"\n{task.engine} seed {task.seed} could not be done: {task.note}")
    again = sum(task.attempts - 1 for task in tasks)
    counts: dict[str, Any] = {
        "seeds done": len(tasks) - len(broken),
        "begun again": again,
        "could not be done": len(broken),
        "examples": sum(task.examples for task in tasks),
        "findings": len(campaign.findings),
    }
    console.print("\n" + "; ".join(f"{name}: {count}" for name, count in counts.items()))
    console.print(f"{out / 'campaign.json'}")
    return 2 if broken else int(bool(campaign.findings))


def _table(campaign: Campaign) -> Table:
    table = Table("finding", "engine", "invariants", "drafters", "seeds", "test", box=None, pad_edge=False)
    for key, finding in sorted(campaign.findings.items(), key=lambda one: one[1].first.invariants):
        first = finding.first
        drafters, seeds = ", ".join(finding.drafters), str(len(finding.seeds))
        table.add_row(key, first.engine, ", ".join(first.invariants) or "-", drafters, seeds, first.test)
    return table
