"""Trials of many mutants: a fresh process each, a few at a time, and what came of them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec

from harness.mutants.base import Mutant, edited_sources
from harness.mutants.trial import LOG, Event, Order, run

CONTROL = "none"
"""Stands in the place of a mutant's id where there is none."""

LIMIT = 300.0
"""Seconds after which a trial is killed."""

LOG_TAIL = 1500
"""Characters of a dead process's log that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The first test that found an invariant broken, and when: seconds since the process was asked for."""

    invariant: str
    seconds: float
    test: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One mutant on its lanes. `kills` in order of time. `ended` is empty, or says how the process died; the test that
    it was busy with is then the last of `kills`. `smoke`: right, wrong or raises. `failed`: the first test that failed,
    or why none ran."""

    mutant: str
    lanes: tuple[str, ...]
    kills: tuple[Kill, ...]
    num_tests: int
    seconds: float
    smoke: str = ""
    ended: str = ""
    failed: str = ""

    @property
    def red(self) -> tuple[str, ...]:
        return tuple(kill.invariant for kill in self.kills)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A trial held against what the mutant expects."""

    mutant: Mutant
    trial: Trial

    @property
    def killed(self) -> bool:
        """By an invariant that must see it."""
        return bool(set(self.mutant.red) & set(self.trial.red))

    @property
    def time_to_kill(self) -> float | None:
        """Seconds to the first kill by an expected invariant."""
        times = [kill.seconds for kill in self.trial.kills if kill.invariant in self.mutant.expected]
        return min(times, default=None) if self.killed else None

    @property
    def missed(self) -> tuple[str, ...]:
        """Invariants that must turn red and did not."""
        return tuple(name for name in self.mutant.red if name not in self.trial.red)

    @property
    def wrong(self) -> tuple[str, ...]:
        """Invariants that turned red and are not among the expected."""
        return tuple(name for name in self.trial.red if name not in self.mutant.expected)

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the zoo is not in order, in words."""
        found = [] if self.killed else ["survived"]
        if self.missed and self.killed:
            found.append(f"not red: {', '.join(self.missed)}")
        if self.wrong:
            found.append(f"red without being expected: {', '.join(self.wrong)}")
        if self.trial.smoke != self.mutant.smoke:
            found.append(f"a single request is {self.trial.smoke}, expected {self.mutant.smoke}")
        return tuple(found)


@dataclass(slots=True)
class _Running:
    process: BaseProcess
    connection: Connection
    label: str
    order: Order
    started: float
    events: list[Event] = field(default_factory=list)
    ended: str = ""

    def trial(self) -> Trial:
        first: dict[str, Kill] = {}
        for event in (event for event in self.events if event.kind == "test"):
            at, test, message = event.seconds, event.test, event.message
            for name in event.red:
                first.setdefault(name, Kill(invariant=name, seconds=at, test=test, message=message))
        return Trial(
            mutant=self.label,
            lanes=self.order.lanes,
            kills=tuple(sorted(first.values(), key=lambda kill: kill.seconds)),
            num_tests=sum(event.kind == "test" for event in self.events),
            seconds=time.time() - self.started,
            smoke=next((event.message for event in self.events if event.kind == "smoke"), "raises"),
            ended=self.ended,
            failed=self._failed(),
        )

    def _failed(self) -> str:
        if self.ended:
            return self.ended
        tests = [event.test for event in self.events if event.status == "fail"]
        codes = [event.message for event in self.events if event.kind == "end"]
        return tests[0] if tests else "" if codes == ["0"] else f"pytest ended with exit code {codes}"


class Laboratory:
    """Runs trials. Everything that no mutant can touch is imported once, in a server from which each process forks."""

    def __init__(self, workers: int | None = None, limit: float = LIMIT) -> None:
        self.workers = workers or os.cpu_count() or 1
        self.limit = limit
        # Before the server starts, which hands them on.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["harness.mutants.preload"])

    def run(self, mutants: Iterable[Mutant], **wishes: Any) -> Iterator[Verdict]:
        """Verdicts as they come in. `wishes` are fields of `Order`, such as `tier` or `stop`."""
        known = {mutant.id: mutant for mutant in mutants}
        orders = {name: self.order(mutant, **wishes) for name, mutant in known.items()}
        for trial in self.trials(orders):
            yield Verdict(mutant=known[trial.mutant], trial=trial)

    @staticmethod
    def order(mutant: Mutant, *, all_lanes: bool = False, **wishes: Any) -> Callable[[Path], Order]:
        """What to do once there is a folder. Raises `BadMutant` when an edit does not fit."""
        sources = edited_sources(mutant.edits)
        lanes = mutant.lanes if all_lanes else mutant.lanes[:1]

        def make(folder: Path) -> Order:
            own = mkdtemp(prefix=f"{mutant.id}-", dir=folder)
            return Order(
                sources=sources,
                lanes=lanes,
                tests=mutant.suites,
                first=mutant.red,
                folder=own,
                checkpoints=str(folder / "checkpoints"),
                **wishes,
            )

        return make

    def control(self, lanes: Sequence[str], **wishes: Any) -> Callable[[Path], Order]:
        """The same checks with nothing edited."""
        nothing = Mutant(id=CONTROL, fault="nothing", bugs=(), lanes=tuple(lanes), red=(), edits=())
        return self.order(nothing, all_lanes=True, **wishes)

    def trials(self, orders: Mapping[str, Callable[[Path], Order]]) -> Iterator[Trial]:
        """Run them all, by label; each is told as soon as it is over."""
        with _folder() as folder:
            waiting = deque(orders.items())
            running: list[_Running] = []
            while waiting or running:
                while waiting and len(running) < self.workers:
                    label, make = waiting.popleft()
                    running.append(self._start(label, make(folder)))
                self._listen(running)
                for one in [one for one in running if one.ended or not one.process.is_alive()]:
                    running.remove(one)
                    yield self._finish(one)

    def _start(self, label: str, order: Order) -> _Running:
        ours, theirs = self._context.Pipe(duplex=False)
        started = time.time()
        process = self._context.Process(target=run, args=(msgspec.json.encode(order), theirs, started))
        process.start()
        theirs.close()
        return _Running(process, ours, label, order, started)

    def _listen(self, running: Sequence[_Running]) -> None:
        by_connection = {one.connection: one for one in running}
        for ready in wait([*by_connection, *(one.process.sentinel for one in running)], timeout=1.0):
            if isinstance(ready, Connection):
                _read(by_connection[ready])
        for one in running:
            if time.time() - one.started > self.limit:
                one.ended = f"killed after {self.limit:g} s"
                one.process.kill()

    def _finish(self, one: _Running) -> Trial:
        one.process.join()
        while _read(one):
            pass
        over = any(event.kind == "end" for event in one.events)
        if not over:
            log = Path(one.order.folder, LOG).read_text(encoding="utf-8", errors="replace")
            ended = one.ended or f"the process ended with exit code {one.process.exitcode}"
            one.ended = f"{ended}: {log[-LOG_TAIL:].strip()}"
            one.events += _last_test(one)
        one.connection.close()
        one.process.close()
        return one.trial()


def _read(one: _Running) -> bool:
    """Take one event, if there is one."""
    try:
        if not one.connection.poll():
            return False
        one.events.append(msgspec.json.decode(one.connection.recv_bytes(), type=Event))
    except EOFError:
        return False
    return True


def _last_test(one: _Running) -> list[Event]:
    """A process that dies in a test fails it, with all that the test asks for."""
    starts = [event for event in one.events if event.kind == "start"]
    if not starts:
        return []
    return [replace(starts[-1], kind="test", status="fail", message=one.ended)]


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(mkdtemp(prefix="draftproof-mutants-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
