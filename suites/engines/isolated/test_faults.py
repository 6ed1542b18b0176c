"""Engines that misbehave, one fault each: the check fails with what happened and what the engine wrote last, no process
is left, and the next start has a fresh one."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.contract import EngineSetup, Refused, Request, Run
from harness.engines.isolated import Deadlines, EngineFailure, IsolatedFactory
from harness.engines.isolated.engine import WORKERS

FAKE = Path(__file__).parent / "fake_worker.py"
SETUP = EngineSetup(target=Path("nowhere"))
REQUESTS = tuple(Request(request_id=f"q{i}", prompt_token_ids=(1, 2, 3 + i)) for i in range(2))
Make = Callable[..., IsolatedFactory]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[IsolatedFactory] = []

    def factory(fault: str = "", **environment: str) -> IsolatedFactory:
        env = {"WIRE": str(WORKERS), "FAULT": fault, **environment}
        deadlines = Deadlines(hello=10 if fault != "no_hello" else 0.5, start=1.5, run=1.0, end=0.3)
        made.append(IsolatedFactory("fake", Path(sys.executable), FAKE, deadlines, env))
        return made[-1]

    yield factory
    for one in made:
        one.close()


def run(factory: IsolatedFactory) -> Run:
    return factory.start(SETUP).run(REQUESTS)


def test_a_good_engine_answers(make: Make) -> None:
    done = run(make())
    assert [one.token_ids for one in done.completions] == [(3, 2, 1), (4, 2, 1)]
    assert done.capabilities.features == {"max_new_tokens"}


def test_the_process_serves_the_next_engine_too(make: Make) -> None:
    factory = make()
    processes = set()
    for _ in range(2):
        engine = factory.start(SETUP)
        engine.run(REQUESTS)
        engine.close()
        processes.add(factory._worker)
    assert len(processes) == 1


FAULTS = {
    "crash_at_import": ("exit code 1", "libcudart.so.12"),
    "no_hello": ("did not say hello within", ""),
    "another_version": ("speaks version 99", ""),
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


def test_a_refusal_is_no_failure_and_the_process_lives_on(make: Make) -> None:
    factory = make("refuse")
    with pytest.raises(Refused, match="page_size=3"):
        factory.start(SETUP)
    assert factory._worker is not None
    assert factory._worker.alive


def test_a_flood_of_output_is_drained_and_its_end_is_kept(make: Make) -> None:
    """30 MB, far more than a pipe holds: a log that nobody read would stop the engine."""
    factory = make("flood")
    assert len(run(factory).completions) == 2
    assert factory._worker is not None
    assert len(factory._worker._log.tail(0.0)) < 400_000


def test_after_a_death_the_next_start_has_a_fresh_process(make: Make, tmp_path: Path) -> None:
    factory = make("once", ONCE=str(tmp_path / "once"))
    engine = factory.start(SETUP)
    with pytest.raises(EngineFailure, match="exit code 9"):
        engine.run(REQUESTS)
    with pytest.raises(EngineFailure, match="the engine is gone"):
        engine.run(REQUESTS)
    engine.close()
    assert len(run(factory).completions) == 2


def test_a_death_while_it_closes_is_not_the_next_ones_fault(make: Make) -> None:
    factory = make("exit_in_stop")
    for _ in range(2):
        engine = factory.start(SETUP)
        engine.run(REQUESTS)
        engine.close()


def test_nothing_is_left_of_a_process_that_does_not_listen(make: Make) -> None:
    """It ignores SIGTERM and has a child of its own."""
    factory = make("deaf")
    engine = factory.start(SETUP)
    assert factory._worker is not None
    group = factory._worker._process.pid
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
    factory = make()
    factory.start(SETUP)
    assert factory._worker is not None
    environment = Path(f"/proc/{factory._worker._process.pid}/environ").read_bytes()
    assert b"secret" not in environment
    assert b"/somewhere" not in environment
