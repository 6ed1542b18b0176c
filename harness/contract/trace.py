"""The grey box: what an engine may show of its steps, and its counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from harness.contract.completion import LogprobRow

PLACEHOLDER = -1
"""Id in every unused slot of a draft or an emitted block."""


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
    `draft_parents` is [N, num_draft_tokens - 1] where drafts are a tree: 0 for a draft behind the root (the last
    committed token), i + 1 for one behind draft i. None: each draft follows the one before it.
    """

    request_ids: tuple[str, ...]
    num_draft_tokens: int
    draft_token_ids: torch.Tensor
    accept_lens: tuple[int, ...]
    emitted: torch.Tensor
    discarded: tuple[bool, ...]
    hidden: TensorFacts | None = None
    draft_parents: torch.Tensor | None = None


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
    `recurrent_state` [layers, ...] is that of recurrent layers after all tokens but the last.
    """

    owner: str
    token_ids: tuple[int, ...]
    target_kv: torch.Tensor
    draft_kv: torch.Tensor | None = None
    draft_input_ids: torch.Tensor | None = None
    draft_features: torch.Tensor | None = None
    recurrent_state: torch.Tensor | None = None


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
