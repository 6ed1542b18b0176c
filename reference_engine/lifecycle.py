"""The life of an engine between its steps: pause and resume, preemption, reset of the prefix cache, weights read again,
sleep and wake.

Pausing and sleeping are independent: an engine launches while it is neither. Whatever gives up or changes what was
computed first lets the results on their way in, and sends running requests back to the queue: they keep their tokens
and compute their KV again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from reference_engine.config import require
from reference_engine.drafters import load_drafter
from reference_engine.model.causal_lm import CausalLM
from reference_engine.model.weights import Weights

if TYPE_CHECKING:
    from reference_engine.cache.pages import PageAllocator
    from reference_engine.config import EngineConfig
    from reference_engine.drafters.base import Drafter
    from reference_engine.engine import StepOutput
    from reference_engine.model.config import ModelConfig
    from reference_engine.pool import RequestPool
    from reference_engine.request import RequestState
    from reference_engine.runner import Runner
    from reference_engine.sampling.random import RandomSource
    from reference_engine.scheduler import Scheduler

GIVEN_UP = ("target", "drafter", "cache", "pool", "runner")
"""What an engine has not got while it sleeps: everything that lies on the device."""


class LifeCycle(ABC):
    """What can be done to an engine between its steps. Raises ValueError, and changes nothing, for an action that has
    no meaning in the state that the engine is in."""

    config: EngineConfig
    random: RandomSource
    model_config: ModelConfig
    target: CausalLM
    drafter: Drafter | None
    pool: RequestPool
    runner: Runner
    allocator: PageAllocator
    scheduler: Scheduler
    paused: bool = False
    asleep: bool = False
    num_steps: int
    _step: StepOutput

    @abstractmethod
    def _drain(self) -> None:
        """Process the results that are on their way."""

    def pause(self) -> None:
        """Launch nothing from now on. Results on their way are processed; requests can be added and aborted."""
        self._require_awake("pause")
        require(not self.paused, "pause", "paused", "the engine is paused already; resume it first")
        self.paused = True

    def resume(self) -> None:
        self._require_awake("resume")
        require(self.paused, "resume", "running", "the engine is not paused; pause it first")
        self.paused = False

    def preempt(self, owner: str) -> None:
        """A running request, named "request_id#index", gives its pages back and starts again when it is its turn. No
        effect when it is not running (any more)."""
        index = owner.rpartition("#")[2]
        require("#" in owner and index.isdecimal(), "preempt", owner, "must be 'request_id#index', such as 'a#0'")
        if any(request.owner == owner for request in self.scheduler.running):
            self._drain()
            self._send_back([request for request in self.scheduler.running if request.owner == owner])

    def reset_prefix_cache(self) -> None:
        """Forget every cached page that no running request holds."""
        self.allocator.reset_cache()

    def reload_target(self) -> None:
        """Read the target's files again, the drafter's layers included where they lie in them, into the same memory.

        The files are held to what start-up holds them to and must describe the same model, else nothing changes. What
        other weights have computed is computed again; when no weight has changed, all of it stays."""
        self._require_awake("reload_target")
        target, drafter = self._read_target()
        held, read = Weights.of(self.target, "target"), Weights.of(target, "target")
        if self.drafter is not None and drafter is not None:
            held |= _drafter_weights(self.drafter, self.target)
            read |= _drafter_weights(drafter, target)
        self._replace(held, read)

    @property
    def has_drafter_weights(self) -> bool:
        return self.drafter is not None and bool(_drafter_weights(self.drafter, self.target).tensors)

    def reload_drafter(self) -> None:
        """Read the drafter's weights again, as `reload_target` does the target's. What a drafter shares with its target
        is the target's."""
        self._require_awake("reload_drafter")
        held = Weights() if self.drafter is None else _drafter_weights(self.drafter, self.target)
        method = None if self.config.spec is None else self.config.spec.method
        require(bool(held.tensors), "reload_drafter", method, "there are no weights of a drafter to read; leave it out")
        target = self.target
        if self._within_target:
            target, drafter = self._read_target()
        else:
            drafter = load_drafter(self._small_config(), target, self.random, self._num_positions)
        assert drafter is not None
        self._replace(held, _drafter_weights(drafter, target))

    def sleep(self) -> None:
        """Give up weights and KV. Requests keep their tokens; running ones start again after `wake`."""
        self._require_awake("sleep")
        self._stand_down()
        self.runner.close()
        for name in GIVEN_UP:
            delattr(self, name)
        del self.scheduler.pool
        self.asleep = True
        if self.config.device.startswith("cuda"):
            torch.cuda.empty_cache()

    @torch.no_grad()
    def wake(self) -> None:
        """Start up again, weights from the same files; a paused engine stays paused, and one that cannot start asleep.
        Compiled passes and recorded graphs are made anew when they are needed."""
        require(self.asleep, "wake", "awake", "the engine is not asleep; send it to sleep first")
        fresh = type(self)(self.config, self.random)  # type: ignore[call-arg]  # an engine's own constructor
        self._require_same_model(fresh.model_config)
        parts = vars(fresh)
        for name in GIVEN_UP:
            setattr(self, name, parts[name])
        # What is left of it refers to itself, and would live on with all that it holds.
        parts.clear()
        self.scheduler.pool = self.pool
        self.runner.num_steps = self.num_steps
        self.asleep = False

    def _require_awake(self, action: str) -> None:
        require(not self.asleep, action, "asleep", "the engine is asleep; wake it first")

    def _require_same_model(self, config: ModelConfig) -> None:
        mend = f"config.json has changed since start-up ({self.model_config}); start a new engine"
        require(config == self.model_config, "model", config, mend)

    def _send_back(self, requests: Iterable[RequestState]) -> None:
        """Running requests to the queue. No result of theirs may be on its way."""
        for request in list(requests):
            self.scheduler.preempt(request)
            self._step.preempted.append(request.owner)

    def _stand_down(self) -> None:
        """Every running request back to the queue, every page free."""
        self._drain()
        self._send_back(self.scheduler.running)
        self.allocator.reset_cache()
        assert len(self.allocator.free_pages()) == self.allocator.num_pages, "somebody still holds pages"

    def _replace(self, held: Weights, read: Weights) -> None:
        """Copy what was read into the tensors that are used. KV that other weights have computed is worth nothing."""
        held.require_same_form(read)
        if not held.equal(read):
            self._stand_down()
            held.copy_from(read)

    @property
    def _within_target(self) -> bool:
        """Whether the drafter's weights, if it has any, lie in the target's files."""
        return self.config.spec is not None and self.config.spec.model in (None, self.config.model)

    @property
    def _num_positions(self) -> int:
        return self.config.max_pages_per_request * self.config.page_size

    def _small_config(self) -> EngineConfig:
        """For loading weights once more: no room for KV worth speaking of."""
        return replace(self.config, num_pages=1, max_running=1, batch_buckets=(), poison=False)

    @torch.no_grad()
    def _read_target(self) -> tuple[CausalLM, Drafter | None]:
        """The target as its files have it, and the drafter where it lies in the same files."""
        config = self.config
        target = CausalLM(config.model, config.torch_dtype, torch.device(config.device), self._num_positions)
        self._require_same_model(target.config)
        drafter = None
        if self._within_target:
            drafter = load_drafter(self._small_config(), target, self.random, self._num_positions)
        target.finish_loading(with_mtp=config.with_mtp)
        return target, drafter


def _drafter_weights(drafter: Drafter, target: CausalLM) -> Weights:
    memory = [getattr(drafter, name, None) for name in drafter.memory]
    return Weights.of(drafter, "drafter", [target, *memory])
