"""One mutant under the suites' checks, in a process of its own. Events are told as they happen, so that a crash or a
hang loses nothing."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.invariants.base import broken
from harness.mutants.base import ROOT
from harness.mutants.loader import EditedModules, activate
from harness.report.marks import invariant_ids
from harness.workloads.smoke import smoke

LOG = "log"
DEADLINE = 60
"""Seconds that one test may take: a mutant may hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a trial is to do. `sources`: edited modules. `tests`: paths or node ids. `folder`: its own; `checkpoints`:
    known-answer families, written once for all trials. `first`: invariants all of whose tests run, and first; of any
    other at most `others` run (None: all). `unmarked`: tests that speak for no invariant run as well. `stop`: end at
    the first red of `first`, or of anything where nothing is first. What is red already is not tested again."""

    sources: dict[str, str]
    lanes: tuple[str, ...]
    tests: tuple[str, ...]
    folder: str
    checkpoints: str
    first: tuple[str, ...] = ()
    others: int | None = None
    unmarked: bool = False
    stop: bool = False
    tier: str = "fast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`kind` smoke (`message`: right, wrong, raises), start (`red`: the invariants that the test asks for), test
    (`red`: those that it found broken) or end. `seconds` since the trial's first."""

    kind: str
    seconds: float
    test: str = ""
    status: str = ""
    red: tuple[str, ...] = ()
    message: str = ""


def run(order: bytes, connection: Connection, started: float) -> None:
    """Entry of the process; `started` is `time.time()` when it was asked for. What it prints goes to `folder`/log."""
    wish = msgspec.json.decode(order, type=Order)
    folder = Path(wish.folder)
    log = (folder / LOG).open("w", encoding="utf-8", buffering=1)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log.fileno(), stream.fileno())
    sys.dont_write_bytecode = False  # what is not edited is compiled once for all trials
    os.environ["CI"] = "1"
    os.chdir(ROOT)

    def tell(kind: str, **fields: Any) -> None:
        connection.send_bytes(msgspec.json.encode(asdict(Event(kind=kind, seconds=time.time() - started, **fields))))

    edited = activate(wish.sources, folder)
    tell("smoke", message=_smoke(wish))
    options = ["-q", "--no-shrink", f"--deadline={DEADLINE}", f"--rootdir={ROOT}", "-p", "no:cacheprovider"]
    # It collects garbage five times at the end, to tell of finalizers that failed.
    options += ["-p", "no:unraisableexception"]
    options += [f"--checkpoints={wish.checkpoints}", f"--scorecard={folder / 'scorecard.json'}", f"--tier={wish.tier}"]
    options += [f"--basetemp={folder / 'tmp'}", *(f"--drafter={lane}" for lane in wish.lanes)]
    code = pytest.main([*options, *wish.tests], plugins=[Watch(wish, tell, edited)])
    assert not edited.strays(), f"never edited: {edited.strays()}"
    tell("end", message=str(int(code)))


def _smoke(wish: Order) -> str:
    """right, wrong or raises, on each lane."""
    for lane in wish.lanes:
        try:
            if not smoke(lane, Path(wish.checkpoints)):
                return "wrong"
        except Exception:
            traceback.print_exc()
            return "raises"
    return "right"


class Watch:
    """pytest plugin: chooses and orders the tests of invariants, tells what each found, and ends when it is enough."""

    def __init__(self, wish: Order, tell: Callable[..., None], edited: EditedModules) -> None:
        self.wish = wish
        self.edited = edited
        self.tell = tell
        self.red: set[str] = set()

    def pytest_configure(self) -> None:
        self.edited.go_first()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        first, left = set(self.wish.first), Counter[str]()
        chosen: list[tuple[int, pytest.Item]] = []
        for item in items:
            ids = invariant_ids(item)
            told = [self.wish.first.index(name) for name in ids if name in first]
            if told:
                chosen.append((min(told), item))
            elif item.get_closest_marker("composite") and self.wish.others is not None:
                continue
            elif not ids:
                chosen += [(-1, item)] if self.wish.unmarked else []
            elif self.wish.others is None or any(left[name] < self.wish.others for name in ids):
                left.update(ids)
                chosen.append((len(first) + max(left[name] for name in ids), item))
        items[:] = [item for _, item in sorted(chosen, key=lambda pair: pair[0])]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        ids = invariant_ids(item)
        if ids and self.red.issuperset(ids):
            pytest.skip("red already")
        self.tell("start", test=item.nodeid, red=ids)

    # Outermost: the collector makes a refusal of what an engine declined.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            red = tuple(dict.fromkeys(broken(call.excinfo.value, invariant_ids(item))))
            self.red.update(red)
            message = str(call.excinfo.value)[:1000]
            self.tell("test", test=item.nodeid, status="fail", red=red, message=message)
            if self.wish.stop and (not self.wish.first or set(red) & set(self.wish.first)):
                item.session.shouldstop = "killed"
        elif report.when == "call":
            self.tell("test", test=item.nodeid, status="refused" if report.skipped else "pass")
        return report
