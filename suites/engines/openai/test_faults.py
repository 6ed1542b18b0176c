"""A server that misbehaves, one fault each: the check fails with what happened and what the server wrote last; what a
server declines is no failure; and one that is well passes."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.contract import EngineSetup, Refused, Request, Run, SamplingParams
from harness.engines.isolated import EngineFailure, IsolatedEngine
from harness.engines.openai import OpenAIFactory
from harness.invariants import count_1, logp_1
from harness.workloads.known import Checkpoints, known_family, vocabulary
from suites.engines.openai.arrange import server_file
from suites.registration import suite

suite(seconds=16, stage="cpu", needs="cpu")

WALK = vocabulary("walk")
LAW = known_family("walk").target.logprobs
Make = Callable[..., OpenAIFactory]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Checkpoints(tmp_path_factory.mktemp("known")).directory("walk", "float32") / "target"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[OpenAIFactory] = []

    def factory(fault: str = "", **words: object) -> OpenAIFactory:
        made.append(OpenAIFactory(str(server_file(tmp_path, fault, **words))))
        return made[-1]

    yield factory
    for one in made:
        one.close()


def asks(place: int = 0, **sampling: Any) -> Request:
    params = SamplingParams(max_new_tokens=7, **sampling)
    return Request(request_id=f"q{place}", prompt_token_ids=WALK.prompt(3 + place, place), sampling=params)


def run(factory: OpenAIFactory, target: Path, *requests: Request) -> Run:
    engine = factory.start(EngineSetup(target=target))
    try:
        return engine.run(requests or [asks(place, logprobs=2) for place in range(3)])
    finally:
        engine.close()


def test_a_good_server_gives_tokens_text_and_rows(make: Make, target: Path) -> None:
    done = run(make(), target, *(asks(place, logprobs=2, prompt_logprobs=2) for place in range(3)))
    for request, one in zip(done.requests, done.completions, strict=True):
        assert one.token_ids == WALK.continue_(request.prompt_token_ids, 7)
        assert one.text == WALK.text(one.token_ids)
    assert [*logp_1(done, LAW), *count_1(done)] == []


@pytest.mark.parametrize("ids", ["token_ids", "logprobs", "text"])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_tokens_come_back_as_ids_as_pieces_or_as_text(make: Make, target: Path, ids: str, length: int) -> None:
    """A stop id is part of the tokens and not of the text; EOS has no text at all."""
    end = WALK.eos_token_id
    prompt = WALK.prompt(3, 1)
    bias = ((end, 100.0),) if length == 0 else ()
    request = Request(
        request_id="q", prompt_token_ids=prompt, sampling=SamplingParams(max_new_tokens=length or 4, logit_bias=bias)
    )
    done = run(make("" if ids == "token_ids" else "no_ids", ids=ids), target, request)
    assert done.completions[0].token_ids == (WALK.continue_(prompt, length) if length else (end,))


FAULTS = {
    "500": ("HTTP 500: internal server error", "device-side assert triggered"),
    "garbage": ("nonsense was answered to POST /v1/completions", "<html>502 Bad Gateway"),
    "no_choices": ("answered nonsense: the answer has no choices", "it has object"),
    "no_ids": ("answered nonsense: the answer has no token_ids", "request 'q0'"),
    "truncated": ("the answer breaks off after", "serving"),
    "die": ("the server ended with exit code 7", "Segmentation fault"),
    "hang": ("silent for 0.5 s", "serving"),
    "busy_forever": ("HTTP 429: too many requests (asked 4 times)", ""),
    "crash_at_start": ("ended with exit code 1 before it was up", "no kernel image is available"),
    "never_well": ("was not well within 1 s", "serving"),
}
"""By fault: what the failure says, and something that it shows of the server."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told(make: Make, target: Path, fault: str) -> None:
    sizes = {"hang": {"silence": 0.5}, "never_well": {"patience": 1}}.get(fault, {})
    with pytest.raises(EngineFailure) as caught:
        run(make(fault, **sizes), target)
    for part in FAULTS[fault]:
        assert part in str(caught.value)


def test_a_command_that_is_not_there_is_told(make: Make, target: Path) -> None:
    with pytest.raises(EngineFailure, match=r"the server cannot be started: .*No such file"):
        run(make(program="/no/such/python"), target)


def test_wrong_tokens_reach_the_invariants(make: Make, target: Path) -> None:
    done = run(make("wrong_token"), target)
    assert [one.token_ids[-1] == WALK.continue_(one.prompt_token_ids, 7)[-1] for one in done.completions] == [False] * 3


def test_missing_logprobs_reach_the_invariants(make: Make, target: Path) -> None:
    (first, *_) = logp_1(run(make("no_logprobs"), target), LAW)
    assert (first.message, first.got) == ("logprobs has not one row per token", "nothing")


@pytest.mark.parametrize("n", [1, 2])
def test_a_token_too_many_on_the_bill_reaches_the_invariants(make: Make, target: Path, n: int) -> None:
    """One bill goes to all samples of a request."""
    found = count_1(run(make("billed_one_more"), target, asks(n=n, temperature=1.0, seed=3)))
    assert [violation.got for violation in found] == [8]
    assert count_1(run(make(), target, asks(n=n, temperature=1.0, seed=3))) == []


def test_a_server_that_is_busy_is_asked_again(make: Make, target: Path) -> None:
    assert len(run(make("busy"), target).completions) == 3


def test_what_a_server_rejects_is_refused_in_its_words(make: Make, target: Path) -> None:
    request = Request(request_id="far", prompt_token_ids=(1, 99))
    with pytest.raises(Refused, match="request 'far': token 99 is outside the vocabulary of 64"):
        run(make(), target, asks(), request)


def test_a_set_up_that_a_server_declines_is_refused_in_its_words(make: Make, tmp_path: Path) -> None:
    census = Checkpoints(tmp_path).directory("census", "float32") / "target"
    with pytest.raises(Refused, match=r"ValueError: hidden_size=.*: this server knows Markov chains"):
        run(make(), census)


def test_a_failure_is_the_end_of_a_server(make: Make, target: Path) -> None:
    factory = make("500")
    with pytest.raises(EngineFailure):
        run(factory, target)
    engine = factory.start(EngineSetup(target=target))
    assert isinstance(engine, IsolatedEngine)
    with pytest.raises(EngineFailure, match="HTTP 500"):
        engine.run([asks()])
    engine.close()


def test_no_server_outlives_its_engine(make: Make, target: Path) -> None:
    factory = make()
    run(factory, target)
    factory.close()
    assert_no_server(target)


@pytest.mark.parametrize("answering", [False, True])
def test_no_server_outlives_the_harness(make: Make, target: Path, answering: bool) -> None:
    """Whose end of the pipes is gone, be it between two answers or before one can be sent."""
    engine = make().start(EngineSetup(target=target))
    assert isinstance(engine, IsolatedEngine)
    worker = engine._worker
    assert worker is not None
    if answering:
        worker._send(struct.pack(">QQ", 15, 0) + b'{"ask": "wait"}')
    for end in (worker._in, worker._out):
        os.close(end)
    worker._in = worker._out = -1
    assert_no_server(target)
    engine.close()


def assert_no_server(target: Path) -> None:
    for _ in range(50):
        if not servers_of(target):
            return
        time.sleep(0.1)
    pytest.fail(f"still there: {servers_of(target)}")


def servers_of(target: Path) -> list[int]:
    """Processes whose command line names the checkpoint."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(target).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


KEY = 'api_key_env = "DRAFTPROOF_TEST_KEY"'


def test_a_key_is_sent_and_written_nowhere(make: Make, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTPROOF_TEST_KEY", "s3cret")
    factory = make(more=f'{KEY}\nenvironment = {{ FAKE_KEY = "s3cret" }}')
    assert len(run(factory, target).completions) == 3
    assert "s3cret" not in str(factory.dialect.start("", EngineSetup(target=target)) | {"environment": {}})
    assert "s3cret" not in str(factory.environment)


def test_a_key_that_is_missing_is_told_by_the_name_of_its_variable(
    make: Make, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTPROOF_TEST_KEY", raising=False)
    factory = make(more=f'{KEY}\nenvironment = {{ FAKE_KEY = "s3cret" }}')
    with pytest.raises(EngineFailure, match=r"HTTP 401: who are you\? \(api_key_env = 'DRAFTPROOF_TEST_KEY'"):
        run(factory, target)
