"""How an engine is started, what it claims, and what came of a run; the protocol that adapters implement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from harness.contract.completion import Completion
from harness.contract.request import Action, ActionName, Request, require
from harness.contract.trace import SpecCounters, StateSnapshot, StepTrace

DType = Literal["float32", "float64", "bfloat16"]
Script = Callable[[str, tuple[int, ...], int], Sequence[int]]
"""Scripted drafter: (request_id, committed token ids, k) -> up to k draft tokens; -1 and short lists mean no draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSetup:
    """Which drafter and how much it drafts. A chain of k is num_steps=k, topk=1, num_draft_tokens=k+1 (the root, i.e.
    the last committed token, counts as one draft token, as in SGLang).

    `prompt_lookup_min` and `prompt_lookup_max` are the shortest and the longest n-gram that NGRAM looks up.
    `aux_layer_ids` are the layers of `Completion.layer_states`, for EXTRACT_HIDDEN_STATES: i = the residual stream that
    enters layer i, the number of layers = the one that leaves the last.
    """

    method: str
    model: Path | None = None
    num_steps: int
    topk: int = 1
    num_draft_tokens: int
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    script: Script | None = None
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    aux_layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(self.num_steps >= 1, "num_steps", self.num_steps, "must be at least 1")
        require(self.topk >= 1, "topk", self.topk, "must be at least 1")
        require(self.num_draft_tokens >= 2, "num_draft_tokens", self.num_draft_tokens, "must be at least 2")
        require(
            self.topk > 1 or self.num_draft_tokens == self.num_steps + 1,
            "num_draft_tokens",
            self.num_draft_tokens,
            f"must be num_steps + 1 = {self.num_steps + 1} for a chain (topk=1)",
        )

    @classmethod
    def chain(cls, method: str, k: int, model: Path | None = None, **extra: object) -> DrafterSetup:
        return cls(method=method, model=model, num_steps=k, num_draft_tokens=k + 1, **extra)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """How an engine is started. Adapters refuse what their engine cannot do (`Refused`).

    Sizes: `page_size` (None = the engine's own), `chunk_size` and `context_length` in tokens, `num_pages` in pages (0 =
    enough for `max_running` full requests). `batch_buckets` are the padded batch sizes (empty = no padding). `poison`
    fills freed and unwritten KV with a value that no model computes. `snapshots` asks for a `StateSnapshot` of every
    running request after each step. `kernels`: what computes the steps of speculation, where an engine has the choice.
    """

    target: Path
    drafter: DrafterSetup | None = None
    dtype: DType = "float32"
    device: str = "cpu"
    context_length: int = 512
    page_size: int | None = None
    num_pages: int = 0
    max_running: int = 8
    chunk_size: int = 256
    prefix_cache: bool = True
    overlap: bool = False
    batch_buckets: tuple[int, ...] = ()
    poison: bool = True
    snapshots: bool = False
    kernels: Literal["auto", "torch", "triton"] = "auto"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the engine claims. Drafters by their `method`; features by the names of the fields or actions that ask for
    them ("n" for sampled requests, "greedy_n" for greedy ones).

    `ignore_eos`: "emit" (the EOS token is emitted and generation goes on) or "ban" (it is never sampled).
    `processor_order`: the order in which sampling filters act. `grey_box`: the engine gives whole `StepTrace`s.
    `shows`: what of them, or of counters, an engine gives that is no grey box.
    `drafts_with_prefill`: it drafts before the prompt has run, so the first accept length belongs to the forward that
    carried the prompt. `drafts_within_cap`: it drafts no token that `max_new_tokens` would cut off.
    `drafts_for_last`: it drafts even where a single token is left before `max_new_tokens`.
    `drafts_within_context`: it drafts no token behind the context length, be it its own or that of the drafter.
    `dead_end`: what becomes of a request whose masks leave no token to choose, "ends" or "goes_on" with any token.
    `grammar_before_logprobs`: logprobs of a request with a grammar are those of the law that its mask leaves.
    `stop_ids_end_grammars`: under a grammar the stop ids of a request stand for its end and for nothing that it spells.
    `tells_ranks`: its logprob rows have the rank of their token.
    `tells_acceptance`: completions have accept lengths where there are drafts.
    `stop_ids_in_text`: the text of an output holds what the stop id that ended it spells.
    `seeds_of_samples`: "consecutive" (sample i of n is what a request of its own with `seed` + i would be) or
    "unknown".
    """

    engine: str
    version: str
    drafters: frozenset[str]
    features: frozenset[str]
    ignore_eos: Literal["emit", "ban"] = "emit"
    processor_order: tuple[str, ...] = ("penalties", "logit_bias", "temperature", "top_k", "top_p", "min_p")
    grey_box: bool = False
    drafts_with_prefill: bool = False
    drafts_within_cap: bool = False
    drafts_for_last: bool = True
    seeds_of_samples: Literal["consecutive", "unknown"] = "unknown"
    drafts_within_context: bool = False
    dead_end: Literal["ends", "goes_on"] = "goes_on"
    shows: frozenset[str] = frozenset()
    grammar_before_logprobs: bool = False
    stop_ids_end_grammars: bool = False
    tells_ranks: bool = True
    tells_acceptance: bool = True
    stop_ids_in_text: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that was observed while `requests` ran. `steps` is empty for a black-box engine."""

    setup: EngineSetup
    capabilities: Capabilities
    requests: tuple[Request, ...]
    completions: tuple[Completion, ...]
    steps: tuple[StepTrace, ...] = ()
    counters: SpecCounters | None = None
    actions: tuple[Action, ...] = ()
    idle: bool = True
    """False when the step bound ended the run with requests still unfinished."""

    def of(self, request_id: str, index: int = 0) -> Completion:
        """The completion of one request; raises KeyError naming the request when the engine never answered it."""
        for completion in self.completions:
            if completion.request_id == request_id and completion.index == index:
                return completion
        raise KeyError(f"no completion for request {request_id!r} (sample {index})")

    def request(self, request_id: str) -> Request:
        return next(request for request in self.requests if request.request_id == request_id)

    def num_steps_at(self, step: int) -> int:
        """Drafting steps that were set when a step ran: those of the set-up, or of the last `set_num_steps`."""
        set_ = [action for action in self.actions if action.name == "set_num_steps" and action.step <= step]
        if set_:
            # Of those at one step the last one counts: they are taken in the order given.
            last = sorted(set_, key=lambda action: action.step)[-1].value
            assert isinstance(last, int)
            return last
        return self.setup.drafter.num_steps if self.setup.drafter is not None else 0


OnStep = Callable[[StepTrace], None]


class Engine(Protocol):
    """A running engine. State (prefix cache, counters) lives on between runs."""

    @property
    def capabilities(self) -> Capabilities: ...

    def run(
        self,
        requests: Sequence[Request],
        *,
        actions: Sequence[Action] = (),
        on_step: OnStep | None = None,
        max_steps: int = 10_000,
    ) -> Run:
        """Run to completion (or `max_steps`). `actions` are taken in the order given. `on_step` sees each trace as it
        happens and may overwrite the tensors that were delivered (ALIAS-2). Raises `Refused` before any request is
        touched."""
        ...

    def fresh_state(self, token_ids: Sequence[int]) -> StateSnapshot:
        """State after one unchunked, uncached prefill of the committed tokens in a new engine (grey box only)."""
        ...

    def close(self) -> None: ...


class Session(Protocol):
    """A run that is driven from outside, step by step."""

    @property
    def unfinished(self) -> bool: ...

    def add(self, request: Request) -> None:
        """Queue it now, whatever its `arrival_step` and `abort_step`. Raises `Refused`."""
        ...

    def abort(self, request_id: str) -> None: ...

    def act(self, name: ActionName, value: int | str | None = None) -> None:
        """See `Action`."""
        ...

    def step(self) -> StepTrace: ...

    def observed(self) -> Run:
        """What has been seen so far. Its requests and actions carry the steps at which they really came, so that
        `Engine.run` with them repeats it. Requests under way have no completion yet."""
        ...


def ask(session: Session, step: int, requests: Sequence[Request], actions: Sequence[Action]) -> None:
    """What is due before a step: arrivals, then aborts, then actions, each in the order given."""
    for request in requests:
        if request.arrival_step == step:
            session.add(request)
    for request in requests:
        if request.abort_step == step:
            session.abort(request.request_id)
    for action in actions:
        if action.step == step:
            session.act(action.name, action.value)


class SteppedEngine(Engine, Protocol):
    """An engine that can be driven step by step."""

    def open(self) -> Session: ...


class EngineFactory(Protocol):
    """Starts engines. One per adapter: registered by name in `harness/engines/__init__.py`, or somebody's own, given as
    `module:factory` to `--engine`. Made without arguments."""

    name: str

    def start(self, setup: EngineSetup) -> Engine:
        """Raises `Refused` with the reason when the setup cannot be honoured."""
        ...
