"""What every drafter offers, and the drafting loops (chain and tree) that the model-based ones share.

A drafter is called after every forward pass of the target, prefill chunks included. It first ingests the tokens that
the target has just processed (so that its own KV is exact up to the last committed token, overwriting whatever its
drafts left there), then drafts from the token that was sampled last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kernels.base import Backend
from kernels.prepare_next_token import prepare_next_token
from reference_engine.cache.kv import AttentionContext, KVCache, attention_context
from reference_engine.config import SpecConfig, pages_for
from reference_engine.drafters.tree import TreeBuilder
from reference_engine.pool import PLACEHOLDER
from reference_engine.sampling.processors import SamplingBatch, draw, heated
from reference_engine.sampling.random import RandomSource, Stream


@dataclass(slots=True, kw_only=True)
class ProposeInputs:
    """What the target's step leaves for the drafter; N requests, Q processed tokens each at most.

    rows [N] in the pool; request_ids of the real ones (padding rows have none); token_ids, positions [N, Q]: the
    tokens that the target processed, accepted path only, of which num_rows [N] count; hidden [N, Q, width]: final-norm
    rows, or concatenated auxiliary states where the drafter asked for them. sampled_token_ids [N, w], w in
    1..num_steps + 1: what the step emitted, -1 padded; discard [N]: the request is still prefilling, so it emitted
    nothing and backup_token_ids [N] holds the known token that follows. seq_lens [N]: committed tokens, the emitted
    ones included. num_cached [N]: tokens whose rows the request found in the prefix cache, known to the host.
    history [rows, W]: committed token ids. max_seq_len bounds seq_lens on the host. target_cache: what the target has
    written, to be read alone.

    num_steps: how many steps to draft, 0 for none; they give num_drafts draft tokens a row, the width of the proposal.
    limits [N]: the most draft tokens of each row, known to the host; no position of a context lies at or past
    max_tokens. What a chain holds past either is dropped by the runner; a tree must be cut by its drafter.
    """

    rows: torch.Tensor
    request_ids: tuple[str, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    num_rows: torch.Tensor
    hidden: torch.Tensor
    sampled_token_ids: torch.Tensor
    backup_token_ids: torch.Tensor
    discard: torch.Tensor
    all_discarded: bool
    seq_lens: torch.Tensor
    num_cached: Sequence[int]
    history: torch.Tensor
    block_table: torch.Tensor
    max_seq_len: int
    sampling: SamplingBatch
    num_steps: int
    num_drafts: int
    limits: Sequence[int]
    max_tokens: int
    target_cache: KVCache

    @property
    def computed_from(self) -> torch.Tensor:
        """[N]: the first position whose rows each request computed itself."""
        return torch.tensor(self.num_cached, device=self.rows.device)

    @property
    def draft_limits(self) -> torch.Tensor:
        """`limits` on the device."""
        return torch.tensor(self.limits, device=self.rows.device)

    @property
    def room(self) -> torch.Tensor:
        """[N]: no draft may lie deeper, or it would not fit into a context."""
        return (self.max_tokens - self.seq_lens).clamp(min=0)

    @property
    def cuts_chains(self) -> bool:
        """Whether the limits or the room of a row may be less than what is drafted."""
        return min(self.limits) < self.num_drafts or self.max_seq_len + self.num_drafts > self.max_tokens


@dataclass(slots=True)
class Proposal:
    """token_ids [N, num_drafts] int64, PLACEHOLDER = no draft; parents likewise for trees (node index, 0 =
    root), None for chains; probs [N, k, V]: what sampled drafts were drawn from, None for drafts without chance."""

    token_ids: torch.Tensor
    parents: torch.Tensor | None = None
    probs: torch.Tensor | None = None


@dataclass(slots=True)
class InputShadow:
    """What the drafter was fed, by KV slot: token ids [slots] and feature rows [slots, width]. For checks only."""

    token_ids: torch.Tensor
    features: torch.Tensor

    def remember(self, slots: torch.Tensor, token_ids: torch.Tensor, features: torch.Tensor) -> None:
        self.token_ids[slots] = token_ids.reshape(-1)
        self.features[slots] = features.reshape(len(slots), -1).to(self.features.dtype)


class Drafter(ABC):
    """`lookahead`: how many tokens after position p its KV row p depends on; part of the prefix-cache key.
    `pending`: how many of the last committed tokens have no final KV row yet, where that is not `lookahead`.
    `aux_layer_ids`: auxiliary target states that it wants instead of the final-norm rows. `max_positions`: it computes
    no row at or past this position (None: no limit of its own). `memory`: its attributes that hold what requests left
    there; whatever else holds tensors holds weights."""

    lookahead: int = 0
    pending: int | None = None
    max_positions: int | None = None
    memory: tuple[str, ...] = ("cache", "shadow")
    aux_layer_ids: tuple[int, ...] = ()
    num_forwards: int = 0
    shadow: InputShadow | None = None

    @abstractmethod
    def propose(self, inputs: ProposeInputs) -> Proposal:
        """Ingest the step and draft for every request; discarded rows get no draft."""

    def caches(self) -> list[KVCache]:
        """KV caches that share the target's slots, to be poisoned with them."""
        return []

    def num_valid_rows(self, num_tokens: int) -> int:
        """Rows of its KV that are exact for a request of so many committed tokens."""
        rows = max(num_tokens - (self.lookahead if self.pending is None else self.pending), 0)
        return rows if self.max_positions is None else min(rows, self.max_positions)

    def poison(self, pages: Iterable[int]) -> None:
        for cache in self.caches():
            cache.poison(pages)

    def fed(self, slots: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Token ids [rows] and feature rows [rows, width] that it drafts from and was fed for the committed tokens,
        which lie in `slots`; None where it is fed no such thing or does not remember."""
        if self.shadow is None:
            return None, None
        slots = self.final_slots(slots)
        return self.shadow.token_ids[slots], self.shadow.features[slots]

    def final_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Those of the slots of the committed tokens in which its KV is final."""
        return slots[: self.num_valid_rows(len(slots))]

    def layer_states(self, pages: Sequence[int], num_rows: int) -> torch.Tensor | None:
        """Rows [num_rows, layers, hidden] of a request that holds `pages`, for the user; None: it keeps none."""
        del pages, num_rows
        return None


@dataclass(slots=True)
class Drafting:
    """A draft under way: tokens drafted so far ([N] each) and what they were drawn from, the drafter's logits [N, V_d]
    for the next one, and its feature row [N, width]."""

    logits: torch.Tensor
    features: torch.Tensor
    tokens: list[torch.Tensor] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)


class LogitsDrafter(Drafter):
    """A drafter that draws its tokens from logits of its own. Subclasses ingest, then draft."""

    def __init__(self, spec: SpecConfig, vocab_size: int, random: RandomSource, backend: Backend) -> None:
        self.spec = spec
        self.vocab_size = vocab_size
        self.random = random
        self.backend = backend

    @abstractmethod
    def ingest(self, inputs: ProposeInputs, next_token_ids: torch.Tensor) -> Drafting:
        """Feed the processed tokens; leave the logits and feature row that the first draft comes from."""

    @abstractmethod
    def draft(self, inputs: ProposeInputs, drafting: Drafting) -> Proposal:
        """Draft for every row, the discarded ones as well."""

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Ids of the drafter's vocabulary -> ids of the target's."""
        return draft_ids

    def propose(self, inputs: ProposeInputs) -> Proposal:
        sampled, backup = inputs.sampled_token_ids, inputs.backup_token_ids
        next_token_ids, _ = prepare_next_token(sampled, inputs.discard, backup, self.vocab_size, backend=self.backend)
        # Also when nothing is drafted: a later step finds its KV as exact as ever.
        drafting = self.ingest(inputs, next_token_ids)
        if inputs.all_discarded or inputs.num_steps == 0:
            return Proposal(inputs.rows.new_full((len(inputs.rows), inputs.num_drafts), PLACEHOLDER))
        proposal = self.draft(inputs, drafting)
        proposal.token_ids = proposal.token_ids.masked_fill(inputs.discard[:, None], PLACEHOLDER)
        return proposal

    def cramped(self, inputs: ProposeInputs) -> bool:
        """Whether a draft might have to be fed at a position that the drafter has not got."""
        return self.max_positions is not None and inputs.max_seq_len + inputs.num_steps > self.max_positions

    def choose(self, inputs: ProposeInputs, drafting: Drafting) -> torch.Tensor:
        """Draw the next draft token [N] from the logits and note it, in target ids."""
        temperature = inputs.sampling.temperature
        greedy = drafting.logits.argmax(-1)
        if self.spec.draft_sample_method == "greedy":
            token = self.to_target_ids(greedy)
        else:
            best = torch.zeros_like(drafting.logits).scatter_(-1, greedy[:, None], 1.0)
            law = best
            if temperature is not None and inputs.sampling.greedy is not None:
                cold = inputs.sampling.greedy[:, 0]
                hot = heated(drafting.logits, torch.where(cold, 1.0, temperature[:, 0])).softmax(-1)
                law = torch.where(cold, best, hot)
            position = inputs.seq_lens + len(drafting.tokens)
            seeds = inputs.sampling.seeds[:, 0]
            coin = self.random.uniform(seeds, position, Stream.DRAFT)
            token = self.to_target_ids(draw(law, coin, self.backend))
            ids = self.to_target_ids(torch.arange(law.shape[-1], device=law.device))
            full = law.new_zeros(len(law), self.vocab_size)
            drafting.probs.append(full.index_copy_(1, ids, law))
        drafting.tokens.append(token)
        return token

    @staticmethod
    def chain(inputs: ProposeInputs, drafting: Drafting) -> Proposal:
        """The tokens drafted so far as a chain. There may be more than were asked for, where ingesting gives some."""
        probs = torch.stack(drafting.probs[: inputs.num_steps], dim=1) if drafting.probs else None
        return Proposal(torch.stack(drafting.tokens[: inputs.num_steps], dim=1), probs=probs)


class ModelDrafter(LogitsDrafter):
    """A drafter with a model and a KV cache of its own, addressed by the target's block tables.

    Subclasses ingest and step; `base_offset` is where, relative to seq_len, the first draft token is fed: 0 for a
    language model (token at its own position), -1 for feature drafters, whose row p holds the token after p.
    `num_ingest_steps` counts the draft steps whose logits come out of ingesting.
    """

    cache: KVCache
    base_offset: int = 0
    num_ingest_steps: int = 1

    @abstractmethod
    def step(
        self, token_ids: torch.Tensor, features: torch.Tensor, context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed draft tokens [N, Q], or [N] where Q is 1, with feature rows [..., width] -> logits [..., V_d], new
        feature rows."""

    def draft(self, inputs: ProposeInputs, drafting: Drafting) -> Proposal:
        return self._draft_chain(inputs, drafting) if self.spec.topk == 1 else self._draft_tree(inputs, drafting)

    def _draft_chain(self, inputs: ProposeInputs, drafting: Drafting) -> Proposal:
        num_steps, given = inputs.num_steps, self.num_ingest_steps
        contexts: list[AttentionContext] = []
        if num_steps > given:
            drafted = torch.arange(given, num_steps, device=inputs.rows.device)
            positions = (inputs.seq_lens + (self.base_offset - given))[:, None] + drafted
            bound = inputs.max_seq_len + self.base_offset + num_steps - 1
            valid = inputs.room[:, None] > drafted if self.cramped(inputs) else None
            contexts = self.context(inputs, positions, bound, valid=valid).columns()
        if len(drafting.tokens) < num_steps:
            self.choose(inputs, drafting)
        for context in contexts:
            drafting.logits, drafting.features = self.step(drafting.tokens[-1], drafting.features, context)
            self.choose(inputs, drafting)
        return self.chain(inputs, drafting)

    def _draft_tree(self, inputs: ProposeInputs, drafting: Drafting) -> Proposal:
        """Grow an EAGLE-2 tree: each step feeds the topk best nodes and takes topk children of each."""
        spec, num_steps = self.spec, inputs.num_steps
        tree = TreeBuilder(drafting.logits, drafting.features, spec.topk, num_steps, self.to_target_ids)
        base = (inputs.seq_lens + self.base_offset)[:, None]
        cramped = self.cramped(inputs)
        offsets = torch.arange(spec.topk, device=base.device)
        for step in range(1, num_steps):
            first = (step - 1) * spec.topk
            context = self.context(
                inputs,
                base + first + offsets,
                inputs.max_seq_len + self.base_offset + first + spec.topk,
                valid=(inputs.room[:, None] > step).expand(-1, spec.topk) if cramped else None,
                positions=(base + step - 1).expand(-1, spec.topk),
                window_mask=tree.window_mask(step),
            )
            tree.expand(*self.step(tree.tokens, tree.features, context), step)
        return Proposal(*tree.select(inputs.num_drafts, inputs.draft_limits, inputs.room))

    def context(
        self,
        inputs: ProposeInputs,
        cache_positions: torch.Tensor,
        bound: int,
        *,
        valid: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        window_mask: torch.Tensor | None = None,
    ) -> AttentionContext:
        """Addresses in this drafter's cache; a window starts where the first draft token is fed."""
        return attention_context(
            self.cache,
            inputs.block_table,
            cache_positions,
            pages_for(bound, self.cache.page_size),
            valid=valid,
            positions=positions,
            window_start=None if window_mask is None else inputs.seq_lens + self.base_offset,
            window_mask=window_mask,
        )

    def remember(self, context: AttentionContext, token_ids: torch.Tensor, features: torch.Tensor) -> None:
        if self.shadow is not None:
            self.shadow.remember(context.write_slots, token_ids, features)
