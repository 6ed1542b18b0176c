"""An engine in another process, as the contract has it. What it answers is decoded by type and otherwise left alone."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness.contract import (
    Action,
    Capabilities,
    Completion,
    Engine,
    EngineSetup,
    OnStep,
    Refused,
    Request,
    Run,
    SpecCounters,
    StateSnapshot,
    StepTrace,
)
from harness.engines.isolated.base import Dialect
from harness.engines.isolated.fork_server import ForkServer
from harness.engines.isolated.pool import Pool
from harness.engines.isolated.process import Deadlines, EngineFailure, Worker
from harness.record.values import Packed, decoded, plain

T = TypeVar("T")
WORKERS = Path(__file__).resolve().parents[1] / "workers"


class Answer(msgspec.Struct):
    """What a worker says of a run: fields of `Run`."""

    completions: tuple[Completion, ...]
    steps: tuple[StepTrace, ...] = ()
    counters: SpecCounters | None = None
    idle: bool = True


class IsolatedFactory:
    """Starts engines of one kind, each in a worker process with its own Python.

    `room` engines that were closed are kept for whoever starts one that is equal; it gets them with empty caches. One
    that died, hung or answered nonsense is never used again. What was refused once is refused again unasked. `beside`:
    files and folders that the worker file needs beside it. `inherit`: names of variables that the process takes over
    from ours, such as one that holds a key; their values are written nowhere.
    """

    def __init__(
        self,
        name: str,
        dialect: Dialect,
        python: Path,
        script: Path,
        deadlines: Deadlines | None = None,
        environment: Mapping[str, str] | None = None,
        room: int = 3,
        beside: Sequence[Path] = (),
        inherit: Sequence[str] = (),
    ) -> None:
        self.name, self.dialect = name, dialect
        self.script, self.environment, self.beside = script, environment, tuple(beside)
        self._python, self._inherit = python, tuple(inherit)
        self.deadlines = deadlines or Deadlines()
        self._pool = Pool(room)
        self._server: ForkServer | None = None
        self._refused: dict[str, str] = {}
        atexit.register(self.close)

    @property
    def version(self) -> str:
        """The engine's, as its worker tells it."""
        return self._fork_server().version

    def start(self, setup: EngineSetup) -> Engine:
        """Raises `Refused` for what the engine declines, `EngineFailure` when it does not come up."""
        words = self.dialect.start(self.version, setup)
        if setup.drafter is not None and setup.drafter.script is not None:
            raise Refused("script: a scripted drafter cannot be sent to another process")
        key = msgspec.json.encode(words, order="deterministic").decode()
        if key in self._refused:
            raise Refused(self._refused[key])
        worker = self._pool.take(key, self.deadlines.run) or self._started(words, key)
        return IsolatedEngine(self, worker, key, setup)

    def give_back(self, key: str, worker: Worker) -> None:
        """An engine that is not used any more."""
        self._pool.give(key, worker)

    def close(self) -> None:
        """End all processes but those whose engine is in use."""
        self._pool.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _started(self, words: Mapping[str, Any], key: str) -> Worker:
        worker = self._fork_server().fork()
        reply, _ = worker.ask({"ask": "start", "words": words}, self.deadlines.start)
        try:
            told(reply, "ready", worker, "facts")
        except Refused as refusal:
            self._refused[key] = str(refusal)
            worker.close()
            raise
        except EngineFailure:
            worker.close()
            raise
        return worker

    def _fork_server(self) -> ForkServer:
        if self._server is None or not self._server.alive:
            self.close()
            self._server = ForkServer(self._python, self.script, self.deadlines, self.environment, self._inherit)
        return self._server


class IsolatedEngine:
    """An engine that a worker has started."""

    def __init__(self, factory: IsolatedFactory, worker: Worker, key: str, setup: EngineSetup) -> None:
        self.setup = setup
        self.capabilities: Capabilities = factory.dialect.capabilities(factory.version, setup)
        self._factory, self._key = factory, key
        self._worker: Worker | None = worker

    def run(
        self,
        requests: Sequence[Request],
        *,
        actions: Sequence[Action] = (),
        on_step: OnStep | None = None,
        max_steps: int = 10_000,
    ) -> Run:
        """Raises `Refused` for a request that the engine declines, `EngineFailure` when it dies, hangs or answers
        nonsense. Traces come when the run is over: `on_step` sees them, and writes to copies."""
        if self._worker is None or not self._worker.alive:
            raise EngineFailure("the engine is gone: an earlier run ended it")
        asked = [self._factory.dialect.request(request, self.setup) for request in requests]
        order = {"ask": "run", "requests": asked, "actions": plain(actions), "max_steps": max_steps}
        reply, tensors = self._worker.ask(order, self._factory.deadlines.run)
        answer = _decoded(told(reply, "done", self._worker, "run"), tensors)
        if on_step is not None:
            for step in answer.steps:
                on_step(step)
        return Run(
            setup=self.setup,
            capabilities=self.capabilities,
            requests=tuple(requests),
            completions=answer.completions,
            steps=answer.steps,
            counters=answer.counters,
            actions=tuple(actions),
            idle=answer.idle,
        )

    def fresh_state(self, token_ids: Sequence[int]) -> StateSnapshot:
        raise Refused(f"fresh_state of {len(token_ids)} tokens: no snapshots come out of another process")

    def close(self) -> None:
        """Nobody uses it any more."""
        worker, self._worker = self._worker, None
        if worker is not None and worker.alive:
            self._factory.give_back(self._key, worker)


def told(reply: Mapping[str, Any], wanted: str, worker: Worker, part: str) -> Any:
    """The part of a reply that was wanted. Raises what the reply says instead."""
    kind = reply.get("reply")
    if kind == "refused":
        raise Refused(str(reply.get("reason", "")) or "no reason given")
    if kind == "failed":
        raise EngineFailure(f"the engine raised {reply.get('error')}\n{reply.get('trace', '')}")
    if kind != wanted or part not in reply:
        worker.close()
        raise EngineFailure(f"the engine answered nonsense: a reply of kind {kind!r} where {wanted!r} was due")
    return reply[part]


def _decoded(value: Any, tensors: bytes) -> Answer:
    try:
        return decoded(value, Answer, Packed(tensors))
    except ValueError as error:
        raise EngineFailure(f"the engine answered nonsense: {error}") from error
