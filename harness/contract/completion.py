"""What an engine must deliver for a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

FinishReason = Literal["stop", "length", "abort", "error"]
"""error: the engine gave this one request up, and says no more of it."""


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """Log probabilities (nats, of the raw distribution) at one position.

    `rank` is 1-based: 1 + the number of tokens strictly more probable; None where the engine tells none. `top` is
    sorted from the most probable down.
    """

    token_id: int
    logprob: float
    rank: int | None
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
    `pooled_hidden` is [width]: the mean over the rows that `Request.pooled_hidden` names. None where there is no such
    row (the output of a single token), and for a request that was aborted before its first token. `layer_states` is
    [tokens - 1, layers, width] over prompt and output together: the residual stream of the layers that the drafter's
    `aux_layer_ids` name, in their order, for every token that was an input. An aborted request may have none.
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
    pooled_hidden: torch.Tensor | None = None
    accept_lens: tuple[int, ...] | None = None
    draft_lens: tuple[int, ...] | None = None
    layer_states: torch.Tensor | None = None
