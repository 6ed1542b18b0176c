"""A request on the host: what was asked, what was committed, what it holds. The scheduler owns these objects."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch

from reference_engine.config import require
from reference_engine.grammar import Matcher
from reference_engine.row_mean import RowMean

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Defaults decode greedily. `top_k` 0, `top_p` 1, `min_p` 0 are off; `logprobs` n asks for the n best beside the
    sampled token, 0 for the sampled one only. Presence and frequency penalties count output tokens (OpenAI), the
    repetition penalty (CTRL) counts the prompt too. `logit_bias` pairs are (token id, nats). The last id of a bad word
    is banned wherever the output ends in the ids before it: the prompt begins no bad word (vLLM). `allowed_token_ids`,
    when there are any, are all that may come, end of sequence included. `json_schema` (JSON text) and `regex` (matched
    whole) say what the text must be; it ends with an EOS id, which comes nowhere else. Masks win over penalties and
    bias; where they leave no token, the request ends as aborted.
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
    allowed_token_ids: tuple[int, ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    n: int = 1

    def __post_init__(self) -> None:
        temperature = "must be 0 (greedy) or positive, and finite"
        require(0 <= self.temperature < math.inf, "temperature", self.temperature, temperature)
        require(self.top_k >= 0, "top_k", self.top_k, "must be 0 (off) or positive")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]")
        require(0 <= self.min_p < 1, "min_p", self.min_p, "must lie in [0, 1)")
        require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "must be at least 1")
        cap = f"must lie in 0..max_new_tokens ({self.max_new_tokens})"
        require(0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", self.min_new_tokens, cap)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or value >= 0, name, value, "must be None (off) or >= 0")
        penalty = "must be positive and finite"
        require(0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            require(math.isfinite(getattr(self, name)), name, getattr(self, name), "must be finite")
        bias = "values must be finite, or -inf to ban a token"
        require(all(value < math.inf for _, value in self.logit_bias), "logit_bias", self.logit_bias, bias)
        require(all(self.bad_words), "bad_words", self.bad_words, "token sequences must not be empty")
        require(all(self.stop), "stop", self.stop, "stop strings must not be empty")
        if self.constrained:
            one = "give one of json_schema and regex, not both"
            require(self.json_schema is None or self.regex is None, "regex", self.regex, one)
            require(not self.ignore_eos, "ignore_eos", True, "a json_schema or regex ends with an EOS id; leave it out")
        require(self.n >= 1, "n", self.n, "must be at least 1")

    @property
    def constrained(self) -> bool:
        """Whether a grammar says what the text must be."""
        return self.json_schema is not None or self.regex is not None

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Raw log probability (nats) of one token, its 1-based rank and the n best (id, logprob), best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """One sample of one request.

    `matcher` stands behind the committed output of a request with a grammar; it is host state, so that a preemption
    leaves it alone. `row` is its row in the `RequestPool` (-1 = none). `num_computed` counts prefilled tokens whose
    target KV has been launched; prefill is over once it reaches `prefill_end`. `pending` counts launched steps whose
    results were not processed, `pending_emits` those of them that add a token or more, `pending_tokens` the most that
    they can add. `num_speculative_tokens` is the most that may be drafted for it in a step (None: no limit of its own),
    `num_drafts` the most that the last launch can have drafted.
    """

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    return_hidden_states: bool
    seed: int
    arrival: int
    pooled: RowMean | None = None
    matcher: Matcher | None = None
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    output_token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    row: int = -1
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    reported_cached: int | None = None
    num_computed: int = 0
    prefill_end: int = 0
    pending: int = 0
    pending_emits: int = 0
    pending_tokens: int = 0
    prefill_hidden: list[torch.Tensor] = field(default_factory=list)
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)
    prompt_delivered: bool = False
    accept_lens: list[int] = field(default_factory=list)
    draft_lens: list[int] = field(default_factory=list)
    num_speculative_tokens: int | None = None
    num_drafts: int = 0

    @property
    def owner(self) -> str:
        return f"{self.request_id}#{self.index}"

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def num_tokens(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """The most tokens that the device can have committed: results not yet processed included."""
        return self.num_tokens + self.pending_tokens

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.prefill_end

    @property
    def num_final(self) -> int:
        """Committed tokens whose KV is computed: all but the last once prefill is over."""
        return (
            self.num_computed
            if self.prefilling
            else self.num_tokens - 1
            if self.output_token_ids
            else self.num_computed
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.prompt_token_ids, *self.output_token_ids)

    @property
    def needs_all_prompt_rows(self) -> bool:
        """Prompt logprobs, hidden states and their mean need every prompt row computed, so the prefix cache is passed
        over."""
        pools_prompt = self.pooled is not None and self.pooled.needs_prompt
        return self.return_hidden_states or pools_prompt or self.sampling.prompt_logprobs is not None

    def begin_prefill(self, num_cached: int) -> None:
        """Fresh requests prefill the whole prompt and sample; resumed ones stop before their last committed token,
        which is known already, so that blocks and seeds fall as they would have without the preemption."""
        self.status = Status.RUNNING
        self.num_cached = self.num_computed = num_cached
        if self.reported_cached is None:
            self.reported_cached = num_cached
        self.prefill_end = self.num_tokens - 1 if self.output_token_ids else len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one step delivered to one request. `token_ids`, `logprobs` and `decode_hidden` are new since the last one.

    `prefill_hidden` [prompt_len, width] comes once, with the first token; `decode_hidden` rows are [width], each in
    storage of its own. `num_output_tokens` counts all so far. `finish_reason`, `text`, `accept_lens`, `draft_lens`,
    `pooled_hidden` [width] float64 and `prompt_logprobs` come with the last one, as do `layer_states`
    [tokens - 1, layers, width] of prompt and output where the drafter keeps them and all of these tokens had been an
    input.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prefill_hidden: torch.Tensor | None = None
    decode_hidden: tuple[torch.Tensor, ...] = ()
    pooled_hidden: torch.Tensor | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    text: str | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    accept_lens: tuple[int, ...] = ()
    draft_lens: tuple[int, ...] = ()
    layer_states: torch.Tensor | None = None
