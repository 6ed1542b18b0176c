"""The worker of llama.cpp over a program that stands for `llama-server`: what its answers become, and each way in which
it can fail."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from harness.contract import DrafterSetup, EngineSetup, Refused, Request, Run, SamplingParams
from harness.engines.isolated import Deadlines, EngineFailure, IsolatedEngine, IsolatedFactory
from harness.engines.isolated.engine import WORKERS
from harness.engines.llama_cpp import LlamaCppDialect
from suites.registration import suite

suite(seconds=12, stage="cpu", needs="cpu")

FAKE = Path(__file__).parent / "fake_server.py"
SETUP = EngineSetup(target=Path("/nowhere/model.gguf"), max_running=2)
DRAFTING = replace(SETUP, drafter=DrafterSetup.chain("NGRAM", 2))
REQUESTS = tuple(
    Request(request_id=f"q{i}", prompt_token_ids=(1, 2, 3, 4, 5, 6 + i), sampling=SamplingParams(logprobs=1))
    for i in range(2)
)
Make = Callable[..., IsolatedFactory]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[IsolatedFactory] = []
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{FAKE.read_text(encoding='utf-8')}", encoding="utf-8")
    program.chmod(0o755)

    def factory(fault: str = "") -> IsolatedFactory:
        env = {"PATH": str(tmp_path), "FAULT": fault, "ONCE": str(tmp_path / "once")}
        deadlines = Deadlines(hello=30, start=30 if fault != "never_loaded" else 3, run=30, end=2)
        deadlines = replace(deadlines, run=2) if fault == "hangs" else deadlines
        script = WORKERS / "llama_cpp_worker.py"
        made.append(IsolatedFactory("llama.cpp", LlamaCppDialect(), Path(sys.executable), script, deadlines, env))
        return made[-1]

    yield factory
    for one in made:
        one.close()


def left(folder: Path) -> list[int]:
    """Processes of the program in `folder` that still run, a moment later."""
    for _ in range(50):
        found = []
        for one in psutil.process_iter(["cmdline", "status"]):
            ours = str(folder / "llama-server") in (one.info["cmdline"] or ())
            if ours and one.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
        if not found:
            return []
        time.sleep(0.1)
    return found


def run(factory: IsolatedFactory, setup: EngineSetup = SETUP) -> Run:
    engine = factory.start(setup)
    try:
        return engine.run(REQUESTS)
    finally:
        engine.close()


def test_pieces_become_a_completion(make: Make) -> None:
    factory = make()
    done = run(factory).of("q0")
    assert (done.token_ids, done.text, done.finish_reason) == ((6, 5, 4, 3, 2, 1), "gfedcb", "stop")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.cached_tokens) == (6, 6, 1)
    assert done.logprobs is not None
    first = done.logprobs[0]
    assert (first.token_id, first.logprob, first.rank, first.top) == (6, -2.0, 2, ((9, -1.0),))
    assert done.accept_lens is None
    assert factory.version == "b77"


def test_totals_become_steps(make: Make) -> None:
    """Two blocks of two drafts, one of each right, and a step without drafts."""
    done = run(make(), DRAFTING).of("q0")
    assert (done.accept_lens, done.draft_lens) == ((2, 2, 1), (2, 2, 0))


def test_requests_of_a_batch_are_sent_at_once(make: Make) -> None:
    assert len(run(make("one_at_a_time")).completions) == 2


def test_another_port_is_tried_when_one_was_taken_meanwhile(make: Make) -> None:
    assert len(run(make("port_taken")).completions) == 2


def test_an_emptied_engine_is_another_process(make: Make, tmp_path: Path) -> None:
    factory = make()
    workers, servers = [], []
    for _ in range(2):
        engine = factory.start(SETUP)
        assert isinstance(engine, IsolatedEngine)
        assert engine._worker is not None
        workers.append(engine._worker.pid)
        servers.append([child.pid for child in psutil.Process(engine._worker.pid).children()])
        engine.run(REQUESTS)
        engine.close()
    assert workers[0] == workers[1]
    assert len(servers[0]) == len(servers[1]) == 1
    assert servers[0] != servers[1]
    factory.close()
    assert not left(tmp_path)


def test_a_worker_that_is_killed_leaves_no_server(make: Make, tmp_path: Path) -> None:
    factory = make()
    engine = factory.start(SETUP)
    assert isinstance(engine, IsolatedEngine)
    assert engine._worker is not None
    psutil.Process(engine._worker.pid).kill()
    assert not left(tmp_path)


def test_a_server_that_ends_instead_of_serving_refuses(make: Make) -> None:
    with pytest.raises(Refused, match=r"exit code 1.*\n.*missing tensor 'blk\.0\.attn_q\.weight'"):
        make("refuses").start(SETUP)


def test_a_request_that_is_declined_is_refused_in_the_servers_words(make: Make) -> None:
    with pytest.raises(Refused, match="request 'q0': Prompt contains invalid tokens"):
        run(make("declines"))


FAULTS = {
    "crashes": ("crashed at its start", "GGML_ASSERT"),
    "never_loaded": ("did not start within 3 s", ""),
    "hangs": ("did not run within 2 s", "asked for [1, 2, 3, 4, 5, 6"),
    "fails": ("HTTP 500: no slot is free", "request 'q0'"),
    "garbage": ("no JSON", "{not json"),
    "fails_on_the_way": ("decode() failed", "request 'q0'"),
    "breaks_off": ("broke off", "request 'q0'"),
    "dies": ("llama-server ended with exit code -11", "request 'q"),
}
"""By fault: what the failure says."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_and_no_process_is_left(make: Make, tmp_path: Path, fault: str) -> None:
    factory = make(fault)
    with pytest.raises(EngineFailure) as caught:
        run(factory)
    for part in FAULTS[fault]:
        assert part in str(caught.value)
    factory.close()
    assert not left(tmp_path)
