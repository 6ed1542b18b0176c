"""Engines with one fault planted on purpose, made from the reference engine: what the plugin must make of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.contract import Action, Capabilities, Engine, EngineSetup, OnStep, Refused, Request, Run, StateSnapshot
from harness.engines import engine_factory


class PlantedEngine:
    """The reference engine, with `spoil` between it and the world."""

    def __init__(self, inner: Engine, spoil: Callable[[Run], Run]) -> None:
        self.inner, self.spoil = inner, spoil

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def run(
        self,
        requests: Sequence[Request],
        *,
        actions: Sequence[Action] = (),
        on_step: OnStep | None = None,
        max_steps: int = 10_000,
    ) -> Run:
        return self.spoil(self.inner.run(requests, actions=actions, on_step=on_step, max_steps=max_steps))

    def fresh_state(self, token_ids: Sequence[int]) -> StateSnapshot:
        return self.inner.fresh_state(token_ids)

    def close(self) -> None:
        self.inner.close()


class WrongUsage:
    """Bills a token too many to all but the shortest completions."""

    name = "wrong-usage"

    def start(self, setup: EngineSetup) -> Engine:
        return PlantedEngine(engine_factory("reference").start(setup), self.spoil)

    @staticmethod
    def spoil(run: Run) -> Run:
        return replace(
            run,
            completions=tuple(
                replace(done, usage=replace(done.usage, completion_tokens=len(done.token_ids) + 1))
                if len(done.token_ids) > 1
                else done
                for done in run.completions
            ),
        )


class RefusesDrafters:
    """Serves plain requests and declines every drafter."""

    name = "refuses-drafters"

    def start(self, setup: EngineSetup) -> Engine:
        if setup.drafter is not None:
            raise Refused(f"drafter.method={setup.drafter.method!r}: not built into this engine; leave it out")
        return engine_factory("reference").start(setup)


class HidesAcceptance:
    """Keeps accept lengths to itself, and says so."""

    name = "hides-acceptance"

    def start(self, setup: EngineSetup) -> Engine:
        return _Silent(engine_factory("reference").start(setup), self.spoil)

    @staticmethod
    def spoil(run: Run) -> Run:
        return replace(run, steps=(), completions=tuple(replace(done, accept_lens=None) for done in run.completions))


class _Silent(PlantedEngine):
    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, grey_box=False, tells_acceptance=False)


class Hangs:
    """Never answers when there is a drafter."""

    name = "hangs"

    def start(self, setup: EngineSetup) -> Engine:
        return PlantedEngine(engine_factory("reference").start(setup), self.spoil)

    @staticmethod
    def spoil(run: Run) -> Run:
        if run.setup.drafter is not None:
            for _ in itertools.count():
                pass
        return run
