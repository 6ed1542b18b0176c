"""Engines that misbehave, one fault each: the check fails with what happened and what the engine wrote last, no process
is left, and the next start has a fresh one."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.contract import Capabilities, Engine, EngineSetup, Refused, Request, Run
from harness.engines.isolated import Deadlines, EngineFailure, IsolatedEngine, IsolatedFactory, Worker
from harness.engines.isolated.engine import WORKERS
from harness.record.values import plain
from suites.registration import suite

suite(seconds=13, stage="cpu", needs="cpu")

FAKE = Path(__file__).parent / "fake_worker.py"
SETUP = EngineSetup(target=Path("nowhere"))
REQUESTS = tuple(Request(request_id=f"q{i}", prompt_token_ids=(1, 2, 3 + i)) for i in range(2))
Make = Callable[..., IsolatedFactory]


class FakeDialect:
    """Says everything as the contract does."""

    def capabilities(self, version: str, setup: EngineSetup) -> Capabilities:
        del setup
        return Capabilities(
            engine="fake", version=version, drafters=frozenset(), features=frozenset({"max_new_tokens"})
        )

    def start(self, version: str, setup: EngineSetup) -> Any:
        del version
        return plain(setup)

    def request(self, request: Request, setup: EngineSetup) -> Any:
        del setup
        return plain(request)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[IsolatedFactory] = []

    def factory(fault: str = "", **environment: str) -> IsolatedFactory:
        env = {"WIRE": str(WORKERS), "FAULT": fault, **environment}
        deadlines = Deadlines(hello=10 if fault != "no_hello" else 0.5, start=1.5, run=1.0, end=0.3)
        made.append(IsolatedFactory("fake", FakeDialect(), Path(sys.executable), FAKE, deadlines, env))
        return made[-1]

    yield factory
    for one in made:
        one.close()


def run(factory: IsolatedFactory) -> Run:
    engine = factory.start(SETUP)
    try:
        return engine.run(REQUESTS)
    finally:
        engine.close()


def test_a_good_engine_answers(make: Make) -> None:
    done = run(make())
    assert [one.token_ids for one in done.completions] == [(3, 2, 1), (4, 2, 1)]
    assert done.capabilities.features == {"max_new_tokens"}


def worker_of(engine: Engine) -> Worker:
    assert isinstance(engine, IsolatedEngine)
    assert engine._worker is not None
    return engine._worker


def used(factory: IsolatedFactory, setup: EngineSetup = SETUP) -> Worker:
    """The worker whose engine ran, and was closed."""
    engine = factory.start(setup)
    worker = worker_of(engine)
    engine.run(REQUESTS)
    engine.close()
    return worker


def test_an_equal_engine_is_used_again(make: Make) -> None:
    factory = make()
    assert used(factory) is used(factory)


def test_another_engine_is_a_process_of_its_own(make: Make) -> None:
    factory = make()
    assert used(factory) is not used(factory, replace(SETUP, seed=1))


def test_an_engine_in_use_is_not_given_away(make: Make) -> None:
    factory = make()
    one, other = factory.start(SETUP), factory.start(SETUP)
    assert worker_of(one) is not worker_of(other)
    for engine in (one, other):
        engine.close()


def test_the_engine_unused_longest_ends_first(make: Make) -> None:
    factory = make()
    workers = [used(factory, replace(SETUP, seed=seed)) for seed in range(4)]
    assert [worker.alive for worker in workers] == [False, True, True, True]
    factory.close()
    assert not any(worker.alive for worker in workers)


@pytest.mark.parametrize("fault", ["exit_in_reset", "raise_in_reset"])
def test_an_engine_that_cannot_be_emptied_is_not_used_again(make: Make, fault: str) -> None:
    factory = make(fault)
    first = used(factory)
    assert used(factory) is not first
    assert not first.alive


def test_what_was_refused_is_refused_again_unasked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    factory = make("refuse")
    for _ in range(2):
        with pytest.raises(Refused, match="page_size=3"):
            factory.start(SETUP)
        monkeypatch.setattr(factory, "_started", None)


FAULTS = {
    "crash_at_import": ("exit code 1", "libcudart.so.12"),
    "no_hello": ("did not say hello within", ""),
    "another_version": ("speaks version 99", ""),
    "crash_in_load": ("could not be imported: ImportError", "fake_kernels"),
    "crash_in_start": ("RuntimeError: no kernel image", ""),
    "hang_in_start": ("did not start within 1.5 s", "starting on nowhere"),
    "exit": ("ended with exit code 3", "about to go"),
    "segfault": ("was ended by SIGSEGV", "run 1"),
    "out_of_memory": ("SIGKILL, as the system does when memory runs out", "run 1"),
    "hang": ("did not run within 1 s", "run 1"),
    "deaf": ("did not run within 1 s", "run 1"),
    "raise": ("ValueError: tensor sizes do not match", "Traceback"),
    "wrong_type": ("answered nonsense", "token_ids"),
    "no_such_tensor": ("answered nonsense", "s9"),
    "nothing": ("answered nonsense", ""),
    "raw_bytes": ("answered nonsense", ""),
}
"""By fault: what the failure says, and something that it shows of the engine."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told(make: Make, fault: str) -> None:
    factory = make(fault)
    with pytest.raises(EngineFailure) as caught:
        run(factory)
    for part in FAULTS[fault]:
        assert part in str(caught.value)


def test_a_flood_of_output_is_drained_and_its_end_is_kept(make: Make) -> None:
    """30 MB, far more than a pipe holds: a log that nobody read would stop the engine."""
    engine = make("flood").start(SETUP)
    assert len(engine.run(REQUESTS).completions) == 2
    assert len(worker_of(engine)._log.tail(0.0)) < 400_000
    engine.close()


def test_after_a_death_the_next_start_has_a_fresh_process(make: Make, tmp_path: Path) -> None:
    factory = make("once", ONCE=str(tmp_path / "once"))
    engine = factory.start(SETUP)
    with pytest.raises(EngineFailure, match="exit code 9"):
        engine.run(REQUESTS)
    with pytest.raises(EngineFailure, match="the engine is gone"):
        engine.run(REQUESTS)
    engine.close()
    assert len(run(factory).completions) == 2


def test_nothing_is_left_of_a_process_that_does_not_listen(make: Make) -> None:
    """It ignores SIGTERM and has a child of its own."""
    engine = make("deaf").start(SETUP)
    group = worker_of(engine).pid
    with pytest.raises(EngineFailure):
        engine.run(REQUESTS)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a process of the engine's group is still there")


def test_nan_reaches_the_invariants(make: Make) -> None:
    """A worker does not judge, and JSON has no NaN: it must come through all the same."""
    done = run(make("nan"))
    assert done.completions[0].logprobs is not None
    assert math.isnan(done.completions[0].logprobs[0].logprob)
    assert done.completions[0].logprobs[0].top == ((1, -math.inf),)


def test_a_worker_sees_nothing_of_ours(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither our module path nor a token of ours."""
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    engine = make().start(SETUP)
    environment = Path(f"/proc/{worker_of(engine).pid}/environ").read_bytes()
    assert b"secret" not in environment
    assert b"/somewhere" not in environment
    engine.close()


def test_a_worker_finds_no_package_of_ours(make: Make) -> None:
    """`kernels` is a public package's name. Neither a path nor what an editable installation leaves leads to ours."""
    with pytest.raises(EngineFailure, match=r"seen: \[\]"):
        run(make("sees_ours", OURS=str(WORKERS.parents[2])))


def test_what_every_engine_needs_is_imported_once(make: Make) -> None:
    """Engines are forks of one process that has it."""
    factory = make()
    engines = [factory.start(replace(SETUP, seed=seed)) for seed in range(3)]
    parents = {parent_of(worker_of(engine).pid) for engine in engines}
    assert len(parents) == 1
    for engine in engines:
        engine.close()


def test_after_the_death_of_that_process_the_next_start_has_a_new_one(make: Make) -> None:
    factory = make()
    engine = factory.start(SETUP)
    parent = parent_of(worker_of(engine).pid)
    os.kill(parent, signal.SIGKILL)
    with pytest.raises(EngineFailure):
        engine.run(REQUESTS)
    engine.close()
    again = factory.start(SETUP)
    assert parent_of(worker_of(again).pid) != parent
    assert len(again.run(REQUESTS).completions) == 2
    again.close()


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
