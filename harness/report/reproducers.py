"""What is left of a failed check on an engine in another process: a folder with everything that it takes to see it
again, without Draftproof."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from harness.contract import Engine, EngineSetup, Refused, Request, Run
from harness.engines.isolated import EngineFailure, IsolatedFactory
from harness.invariants import finish_1
from harness.workloads.lane import Attempt, Lane
from harness.workloads.lanes import factory_of
from harness.workloads.shrink import shrink
from harness.workloads.verdicts import of_a_recording

SECONDS, IN_ALL = 20.0, 120.0
"""How long one failure is made smaller, and how long all of a process together; the others are kept as they came."""

Judge = Callable[[Run, Run | None], bool]
"""(run, the same without speculation) -> whether what failed fails here, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What failed: the set-up and the requests, whether they had run before on that engine, and the words of the
    check. `judge` is None for an engine that crashed or hung."""

    setup: EngineSetup
    requests: tuple[Request, ...]
    warm: bool
    max_steps: int
    why: str
    judge: Judge | None


def reproduce(factory: IsolatedFactory, failure: Failure, folder: Path, seconds: float = SECONDS) -> Path | None:
    """Make it smaller and write the folder. None when it does not fail again, not even as it was."""

    def fails(requests: tuple[Request, ...]) -> bool:
        try:
            return _fails(factory, replace(failure, requests=requests))
        except Refused:
            return False

    if not fails(failure.requests):
        return None
    smallest = replace(failure, requests=shrink(failure.requests, fails, seconds))
    _write(factory, smallest, folder)
    return folder


def _fails(factory: IsolatedFactory, failure: Failure) -> bool:
    try:
        run = _run(factory, failure)
    except EngineFailure as error:
        return failure.judge is None and _kind(str(error)) == _kind(failure.why)
    return failure.judge is not None and failure.judge(run, _plain_run(factory, failure))


def _run(factory: IsolatedFactory, failure: Failure) -> Run:
    engine = factory.start(failure.setup)
    try:
        return _asked(engine, failure)
    finally:
        engine.close()


def _asked(engine: Engine, failure: Failure) -> Run:
    if failure.warm:
        engine.run(failure.requests, max_steps=failure.max_steps)
    return engine.run(failure.requests, max_steps=failure.max_steps)


def _plain_run(factory: IsolatedFactory, failure: Failure) -> Run | None:
    """Without speculation; None where the engine cannot."""
    if failure.setup.drafter is None:
        return None
    try:
        return _run(factory, replace(failure, setup=replace(failure.setup, drafter=None), warm=False))
    except (EngineFailure, Refused):
        return None


def _kind(message: str) -> str:
    """What an engine said first, whatever the numbers in it: a smaller batch may fail for another reason."""
    return re.sub(r"-?\d+", "N", message.partition("\n")[0])


def _write(factory: IsolatedFactory, failure: Failure, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = factory.dialect.start(factory.version, failure.setup)
    text = json.dumps(words)
    drafter = failure.setup.drafter
    models = {"target": failure.setup.target, "drafter": None if drafter is None else drafter.model}
    for name, model in models.items():
        if model is not None:
            shutil.copytree(model, folder / name)
            text = text.replace(json.dumps(str(model)), json.dumps(f"{{here}}/{name}"))
    try:
        seen = _tokens(_run(factory, failure))
    except EngineFailure:
        seen = {}
    greedy = {request.request_id for request in failure.requests if request.sampling.greedy}
    baseline = _tokens(_plain_run(factory, failure))
    requests = [factory.dialect.request(request, failure.setup) for request in failure.requests]
    case = {
        "engine": factory.name,
        "version": factory.version,
        "why": failure.why,
        "worker": factory.script.stem,
        "variables": dict(factory.environment or {}),
        "words": json.loads(text),
        "before": [requests] if failure.warm else [],
        "order": {"ask": "run", "requests": requests, "actions": [], "max_steps": failure.max_steps},
        "expected": {name: tokens for name, tokens in baseline.items() if name.rpartition("#")[0] in greedy},
        "seen": seen,
    }
    (folder / "case.json").write_text(json.dumps(case, indent=1), encoding="utf-8")
    for file in (factory.script, factory.script.with_name("wire.py"), factory.script.with_name("reproduce.py")):
        shutil.copy(file, folder)
    for extra in factory.beside:
        copy = shutil.copytree if extra.is_dir() else shutil.copy
        copy(extra, folder / extra.name)


def _tokens(run: Run | None) -> dict[str, list[int]]:
    done = run.completions if run is not None else ()
    return {f"{one.request_id}#{one.index}": list(one.token_ids) for one in done}


class Keeper:
    """Keeps one folder for each test that fails, in `root`, named after the test."""

    def __init__(self, root: Path, seconds: float = SECONDS, in_all: float = IN_ALL) -> None:
        self._root, self._seconds, self._left = root, seconds, in_all
        self._told: dict[str, str] = {}

    def __call__(self, lane: Lane, attempts: Sequence[Attempt], why: str, broken: frozenset[str]) -> str:
        """See `Keep`. The newest attempt that fails again is kept."""
        factory = factory_of(lane.engine)
        name = _file_name(lane.engine, os.environ.get("PYTEST_CURRENT_TEST", "test").rpartition(" (")[0])
        if not isinstance(factory, IsolatedFactory):
            return ""
        if name not in self._told:
            # A property test runs a failing example again: it is kept once.
            self._told[name] = ""
            started = time.monotonic()
            self._told[name] = self._kept(lane, factory, attempts, why, broken, self._root / name)
            self._left = max(0.0, self._left - (time.monotonic() - started))
        return self._told[name]

    def _kept(
        self,
        lane: Lane,
        factory: IsolatedFactory,
        attempts: Sequence[Attempt],
        why: str,
        broken: frozenset[str],
        folder: Path,
    ) -> str:
        for attempt in reversed(attempts):
            judge = partial(_breaks, lane, attempt.family, broken) if broken else None
            failure = Failure(
                setup=attempt.setup,
                requests=attempt.requests,
                warm=attempt.warm,
                max_steps=attempt.max_steps,
                why=why,
                judge=judge,
            )
            if reproduce(factory, failure, folder, min(self._seconds, self._left)) is not None:
                return f"without Draftproof: PYTHON {folder / 'reproduce.py'}"
        return ""


COMPARE = frozenset({"EQUAL-2", "FINISH-1", "FINISH-2", "LAW-3", "SCHED-1", "SCHED-3"})
"""What compares two runs, and mostly shows as a difference from the run without speculation, too."""


def _breaks(lane: Lane, family: str, broken: frozenset[str], run: Run, baseline: Run | None) -> bool:
    # Against a run without speculation only greedy requests can be held.
    if not any(request.sampling.greedy for request in run.requests):
        baseline = None
    found = of_a_recording(run, baseline, lane, family)
    found += [] if baseline is None else finish_1(run, baseline)
    wanted = broken | ({"EQUAL-1", "FINISH-1"} if broken & COMPARE else set())
    return any(violation.invariant in wanted for violation in found)


def _file_name(*words: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=]+", "-", "-".join(word.rpartition("/")[2] for word in words)).strip("-")
