"""The contract: what an engine is asked, what it must deliver, and all that an invariant may look at.

An adapter in `harness/engines` turns a real engine into an `Engine`: it takes `Request`s and returns a `Run`.
Invariants are pure functions over `Run`s. Nothing here imports an engine.

Terms follow the field: `num_steps`, `topk` and `num_draft_tokens` as in SGLang; accept length = correct drafts
+ 1 bonus token; hidden states are one prefill block and one decode row per token that was an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch

FinishReason = Literal["stop", "length", "abort"]
DType = Literal["float32", "float64", "bfloat16"]
Script = Callable[[str, tuple[int, ...], int], Sequence[int]]
"""Scripted drafter: (request_id, committed token ids, k) -> up to k draft tokens; -1 and short lists mean no draft."""

PLACEHOLDER = -1
"""Id in every unused slot of a draft or an emitted block."""


class Refused(ValueError):
    """An engine declines a setup or a request, at start-up or on arrival, and says why. Not a failure."""


def _require(condition: bool, name: str, value: object, right: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r}: {right}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Defaults decode greedily.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `logprobs` None is off, 0 asks for the
    sampled token only, n for the n best beside it; `prompt_logprobs` likewise over the prompt. Penalties follow the
    OpenAI definitions over output tokens; `repetition_penalty` (CTRL) counts the prompt too. `logit_bias` pairs are
    (token id, additive bias in nats). Raises ValueError naming the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 16
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    n: int = 1

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, "temperature", self.temperature, "must be 0 (greedy) or positive")
        _require(self.top_k >= 0, "top_k", self.top_k, "must be 0 (off) or positive")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]")
        _require(0 <= self.min_p < 1, "min_p", self.min_p, "must lie in [0, 1)")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "must be at least 1")
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            f"must lie in 0..max_new_tokens ({self.max_new_tokens})",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value >= 0, name, value, "must be None or >= 0")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "must be positive")
        _require(all(self.stop), "stop", self.stop, "stop strings must not be empty")
        _require(self.n >= 1, "n", self.n, "must be at least 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. `arrival_step` and `abort_step` count the engine's steps from the start of the run (0-based)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    return_hidden_states: bool = False
    arrival_step: int = 0
    abort_step: int | None = None

    def __post_init__(self) -> None:
        _require(bool(self.request_id), "request_id", self.request_id, "must not be empty")
        _require(len(self.prompt_token_ids) > 0, "prompt_token_ids", self.prompt_token_ids, "must not be empty")
        _require(self.arrival_step >= 0, "arrival_step", self.arrival_step, "must be >= 0")
        _require(
            self.abort_step is None or self.abort_step >= self.arrival_step,
            "abort_step",
            self.abort_step,
            f"must be None or >= arrival_step ({self.arrival_step})",
        )


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """Log probabilities (nats, of the raw distribution) at one position.

    `rank` is 1-based: 1 + the number of tokens strictly more probable. `top` is sorted from the most probable down.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts in tokens. `cached_tokens` is the part of the prompt served from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Final-norm output rows of the target, one form for every engine.

    `prefill` is [prompt_len, width]; `decode` holds completion_tokens - 1 rows of [width]: the last token was never
    an input. Adapters translate packaging (SGLang's entry 0 is the prefill block, vLLM saves prompt + output - 1 rows).
    """

    prefill: torch.Tensor
    decode: tuple[torch.Tensor, ...]

    @property
    def num_entries(self) -> int:
        return 1 + len(self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one request (one of its `n` samples) came to. Optional parts are None when not asked for or not known.

    `logprobs` has one row per completion token; `prompt_logprobs` one entry per prompt token, the first None.
    `accept_lens` has one entry per verify step that this request took part in while unfinished: correct drafts + 1,
    before a finish cut the block. `draft_lens` has the number of draft tokens verified in the same steps.
    """

    request_id: str
    index: int = 0
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    text: str | None = None
    logprobs: tuple[LogprobRow, ...] | None = None
    prompt_logprobs: tuple[LogprobRow | None, ...] | None = None
    hidden_states: HiddenStates | None = None
    accept_lens: tuple[int, ...] | None = None
    draft_lens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Identity of a tensor as it was handed over: enough to prove aliasing without keeping it.

    `stride` and `storage_offset` are in elements, `storage_nbytes` in bytes. `storage_ptr` identifies the storage
    only while it is alive: compare facts taken at the same moment.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    storage_ptr: int
    storage_offset: int
    storage_nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        storage = tensor.untyped_storage()
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            str(tensor.dtype).removeprefix("torch."),
            storage.data_ptr(),
            int(tensor.storage_offset()),
            storage.nbytes(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeTrace:
    """One call of the drafter.

    `token_ids` is a copy [N, k] (PLACEHOLDER = no draft) and `facts` describe the tensor that `propose` returned.
    `k` is the number of draft tokens that were asked for (num_draft_tokens - 1 for a tree); `sampled_width` the width
    1..k+1 of the sampled tokens that the drafter was given; `discarded` marks rows whose sampled token does not count
    (an unfinished prefill chunk). `sampled` describes those sampled tokens, taken at the same moment as `facts`.
    """

    request_ids: tuple[str, ...]
    k: int
    sampled_width: int
    discarded: tuple[bool, ...]
    token_ids: torch.Tensor
    facts: TensorFacts
    sampled: TensorFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyTrace:
    """One verify step. `emitted` is [N, min(num_steps + 1, num_draft_tokens)], PLACEHOLDER after the accept length,
    before any finish cut.

    `draft_token_ids` is [N, num_draft_tokens - 1]. `hidden` describes the strided output
    [N * num_draft_tokens, width]. `discarded` marks requests that had already finished (overlap scheduling).
    """

    request_ids: tuple[str, ...]
    num_draft_tokens: int
    draft_token_ids: torch.Tensor
    accept_lens: tuple[int, ...]
    emitted: torch.Tensor
    discarded: tuple[bool, ...]
    hidden: TensorFacts | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step delivered to one request: copies of nothing, the very objects that the user would get."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    prefill_hidden: torch.Tensor | None = None
    decode_hidden: tuple[torch.Tensor, ...] = ()
    logprobs: tuple[LogprobRow, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True)
class PageLedger:
    """Who owns which KV page. `held` maps an owner (request id#index) to its pages; pages shared through the prefix
    cache appear under every holder and in `shared`. `cached` pages are in the prefix cache and held by nobody.
    """

    total: int
    free: tuple[int, ...]
    held: Mapping[str, tuple[int, ...]]
    cached: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshot:
    """Engine-side state of one request, in token order, as the engine will use it next.

    `token_ids` are the committed tokens; the KV of all but the last must exist. `target_kv` is
    [num_tokens - 1, layers, 2, kv_heads, head_dim], `draft_kv` the same for the drafter over its valid rows.
    `draft_input_ids` [rows] and `draft_features` [rows, width] are what the drafter was fed at each valid row.
    """

    owner: str
    token_ids: tuple[int, ...]
    target_kv: torch.Tensor
    draft_kv: torch.Tensor | None = None
    draft_input_ids: torch.Tensor | None = None
    draft_features: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """Grey box: one engine step. `embedded` is (min, max) over every id that reached an embedding in this step.

    `committed` maps owners to their number of committed tokens after the step; forwards are counted per step.
    """

    step: int
    kind: Literal["extend", "decode", "idle"]
    deltas: tuple[Delta, ...] = ()
    propose: ProposeTrace | None = None
    verify: VerifyTrace | None = None
    embedded: tuple[int, int] | None = None
    pages: PageLedger | None = None
    committed: Mapping[str, int] = field(default_factory=dict)
    snapshots: tuple[StateSnapshot, ...] = ()
    preempted: tuple[str, ...] = ()
    aux_hidden_rows: tuple[int, int] | None = None
    """(rows collected, rows expected) of auxiliary hidden states, where the drafter wants them."""
    target_forwards: int = 0
    draft_forwards: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCounters:
    """The engine's own statistics since the start of the run. `accepted_per_position[i]` counts steps that accepted
    draft i (0-based); a draft is one request in one verify step with at least one draft token.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSetup:
    """Which drafter and how much it drafts. A chain of k is num_steps=k, topk=1, num_draft_tokens=k+1 (the root, i.e.
    the last committed token, counts as one draft token, as in SGLang).
    """

    method: str
    model: Path | None = None
    num_steps: int
    topk: int = 1
    num_draft_tokens: int
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    script: Script | None = None

    def __post_init__(self) -> None:
        _require(self.num_steps >= 1, "num_steps", self.num_steps, "must be at least 1")
        _require(self.topk >= 1, "topk", self.topk, "must be at least 1")
        _require(self.num_draft_tokens >= 2, "num_draft_tokens", self.num_draft_tokens, "must be at least 2")
        _require(
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

    Sizes: `page_size` and `chunk_size` in tokens, `num_pages` in pages (0 = enough for `max_running` full requests),
    `context_length` in tokens. `batch_buckets` are the padded batch sizes (empty = no padding). `poison` fills freed
    and unwritten KV with a value that no model computes. `snapshots` asks for a `StateSnapshot` of every running
    request after each step. `kernels`: what computes the steps of speculation, where an engine has the choice.
    """

    target: Path
    drafter: DrafterSetup | None = None
    dtype: DType = "float32"
    device: str = "cpu"
    context_length: int = 512
    page_size: int = 16
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
    """What the engine claims. Drafters by their `method`; features by the names of the fields that ask for them.

    `ignore_eos`: "emit" (the EOS token is emitted and generation goes on) or "ban" (it is never sampled).
    `processor_order`: the order in which sampling filters act. `grey_box`: the engine gives `StepTrace`s.
    `drafts_with_prefill`: it drafts before the prompt has run, so the first accept length belongs to the forward that
    carried the prompt. `drafts_within_cap`: it drafts no token that `max_new_tokens` would cut off.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that was observed while `requests` ran. `steps` is empty for a black-box engine."""

    setup: EngineSetup
    capabilities: Capabilities
    requests: tuple[Request, ...]
    completions: tuple[Completion, ...]
    steps: tuple[StepTrace, ...] = ()
    counters: SpecCounters | None = None
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


OnStep = Callable[[StepTrace], None]


class Engine(Protocol):
    """A running engine. State (prefix cache, counters) lives on between runs."""

    @property
    def capabilities(self) -> Capabilities: ...

    def run(self, requests: Sequence[Request], *, on_step: OnStep | None = None, max_steps: int = 10_000) -> Run:
        """Run to completion (or `max_steps`). `on_step` sees each trace as it happens and may overwrite the tensors
        that were delivered (ALIAS-2). Raises `Refused` before any request is touched."""
        ...

    def fresh_state(self, token_ids: Sequence[int]) -> StateSnapshot:
        """State after one unchunked, uncached prefill of the committed tokens in a new engine (grey box only)."""
        ...

    def close(self) -> None: ...


class EngineFactory(Protocol):
    """Starts engines. One per adapter, registered by name in `harness/engines/__init__.py`."""

    name: str

    def start(self, setup: EngineSetup) -> Engine:
        """Raises `Refused` with the reason when the setup cannot be honoured."""
        ...
