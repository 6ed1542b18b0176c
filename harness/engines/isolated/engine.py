"""An engine in another process, as the contract has it. What it answers is decoded by type and otherwise left alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class IsolatedFactory:
    """Starts engines of one kind, each in a worker process with its own Python. A worker that has died is replaced by
    the next start; one that lives is kept between engines, since importing an engine takes long."""

    name: str
    python: Path
    script: Path
    deadlines: Deadlines = field(default_factory=Deadlines)
    environment: Mapping[str, str] | None = None
    _worker: Worker | None = None

    def start(self, setup: EngineSetup) -> Engine:
        """Raises `Refused` for what the engine declines, `EngineFailure` when it does not come up."""
        if setup.drafter is not None and setup.drafter.script is not None:
            raise Refused("script: a scripted drafter cannot be sent to another process")
        worker = self._ready_worker()
        reply, _ = worker.ask({"ask": "start", "setup": plain(setup)}, self.deadlines.start)
        capabilities = _decoded(_told(reply, "ready", worker, "capabilities"), Capabilities, b"")
        return IsolatedEngine(self, worker, setup, capabilities)

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _ready_worker(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self.close()
            self._worker = Worker(self.python, self.script, self.deadlines, self.environment)
        return self._worker


class IsolatedEngine:
    """The engine that a worker has started last."""

    def __init__(
        self, factory: IsolatedFactory, worker: Worker, setup: EngineSetup, capabilities: Capabilities
    ) -> None:
        self.setup = setup
        self.capabilities = capabilities
        self._deadlines = factory.deadlines
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
        order = {"ask": "run", "requests": plain(requests), "actions": plain(actions), "max_steps": max_steps}
        reply, tensors = self._worker.ask(order, self._deadlines.run)
        told = _told(reply, "done", self._worker, "run")
        answer = _decoded(told, Answer, tensors)
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
        """Ask the worker to let the engine go. What is wrong with one that cannot shows at the next start."""
        worker, self._worker = self._worker, None
        if worker is not None and worker.alive:
            try:
                worker.ask({"ask": "stop"}, self._deadlines.start)
            except EngineFailure:
                worker.close()


def _told(reply: Mapping[str, Any], wanted: str, worker: Worker, part: str) -> Any:
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


def _decoded(value: Any, type_: type[T], tensors: bytes) -> T:
    try:
        return decoded(value, type_, Packed(tensors))
    except ValueError as error:
        raise EngineFailure(f"the engine answered nonsense: {error}") from error
