"""What the scheduler hands to the runner, and what the runner hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from reference_engine.request import RequestState
from reference_engine.sampling.logprobs import LogprobTensors


@dataclass(slots=True)
class Batch:
    """One launch. An extend batch computes `chunk_lens[i]` prompt tokens from `starts[i]` on; a decode batch verifies
    every request's drafts, in windows of `width` tokens each, the last committed one included. `samples[i]`: this chunk
    ends the prefill of a request that has no output yet."""

    kind: Literal["extend", "decode"]
    requests: list[RequestState]
    starts: list[int] = field(default_factory=list)
    chunk_lens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    ends_prefill: list[bool] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    width: int = 1

    def emits(self, index: int) -> bool:
        """Whether this launch adds tokens to its index-th request."""
        return self.kind == "decode" or self.samples[index]

    @property
    def has_grammar(self) -> bool:
        """Whether it adds tokens to a request that has a grammar."""
        return any(request.matcher is not None and self.emits(i) for i, request in enumerate(self.requests))


@dataclass(slots=True)
class StepResult:
    """Tensors of one launch, still on the device; rows follow `batch.requests`, padding rows after them.

    emitted [N, w] int64 (-1 padded) and counts [N]; hidden [N * Q, width] strided: Q rows a request; accept_index
    [N, w]: which of these rows predicted which emitted token (decode only); draft_tokens [N, batch.width - 1] that were
    verified; draft_parents likewise, for trees: window node of each draft's parent, 0 = root. `stuck` [N] bool, where
    masks make it possible: the last emitted id of the row means nothing, since none was left to choose. `logprobs` over
    emitted tokens, `prompt_logprobs` over the chunk's following prompt tokens.
    """

    batch: Batch
    emitted: torch.Tensor
    counts: torch.Tensor
    hidden: torch.Tensor
    stride: int
    accept_index: torch.Tensor | None = None
    draft_tokens: torch.Tensor | None = None
    draft_parents: torch.Tensor | None = None
    stuck: torch.Tensor | None = None
    logprobs: LogprobTensors | None = None
    prompt_logprobs: LogprobTensors | None = None
    trace: LaunchTrace | None = None


@dataclass(slots=True)
class ProposeRecord:
    """One call of the drafter, for observers: `returned` is the very tensor, `token_ids` what was stored."""

    request_ids: tuple[str, ...]
    k: int
    sampled_width: int
    discarded: tuple[bool, ...]
    returned: torch.Tensor
    sampled: torch.Tensor
    token_ids: torch.Tensor


@dataclass(slots=True)
class LaunchTrace:
    """What an observer may want to know of a launch. `embedded`: smallest and largest id that reached an embedding;
    `aux_rows`: auxiliary rows (collected, expected)."""

    embedded: tuple[int, int]
    propose: ProposeRecord | None = None
    aux_rows: tuple[int, int] | None = None
    target_forwards: int = 0
    draft_forwards: int = 0
