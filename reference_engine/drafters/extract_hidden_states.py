"""EXTRACT_HIDDEN_STATES: no drafter at all, but a way to get at the residual stream of chosen layers (vLLM's method).

A drafter sees the auxiliary states of every token that the target commits, so this one keeps them, in rows that lie
in the pages of the target's KV: prefix hits bring the rows of the prefix along. As a draft it returns the token that
was sampled last, [N, 1], which is verified as any draft and right when the target repeats it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kernels.prepare_next_token import prepare_next_token
from reference_engine.cache.rows import PagedRows
from reference_engine.config import EngineConfig, require
from reference_engine.drafters.base import Drafter, Proposal, ProposeInputs
from reference_engine.model.causal_lm import CausalLM
from reference_engine.pool import PLACEHOLDER
from reference_engine.sampling.random import RandomSource


class ExtractHiddenStatesDrafter(Drafter):
    """`aux_layer_ids`: i = the residual stream entering layer i of the target, num_layers = leaving the last."""

    memory = ("states",)

    def __init__(self, config: EngineConfig, target: CausalLM, random: RandomSource, num_positions: int) -> None:
        del random, num_positions
        spec, layers = config.spec, target.config.num_layers
        assert spec is not None
        method = "EXTRACT_HIDDEN_STATES"
        require(spec.model is None, "model", str(spec.model), f"{method} has no checkpoint; leave it out")
        require(spec.topk == 1, "topk", spec.topk, f"{method} drafts chains only; use topk=1")
        require(spec.num_steps == 1, "num_steps", spec.num_steps, f"{method} drafts one token; use num_steps=1")
        law = f"the sampled token again is drawn from no law; {method} must use 'greedy'"
        require(spec.draft_sample_method == "greedy", "draft_sample_method", spec.draft_sample_method, law)
        ids = spec.aux_layer_ids
        mend = f"must name distinct layers in 0..{layers}, the inputs of the target's layers and the last one's output"
        right = len(ids) == len(set(ids)) > 0 and all(0 <= layer <= layers for layer in ids)
        require(right, "aux_layer_ids", ids, mend)
        self.aux_layer_ids = ids
        self.vocab_size = target.config.vocab_size
        self.backend = config.backend
        self.hidden_size = target.config.hidden_size
        self.states = PagedRows(config, len(ids) * self.hidden_size)

    def propose(self, inputs: ProposeInputs) -> Proposal:
        columns = torch.arange(inputs.token_ids.shape[1], device=inputs.rows.device)
        positions = inputs.positions[:, :1] + columns
        self.states.write(inputs.block_table, positions, inputs.hidden, columns < inputs.num_rows[:, None])
        sampled, backup = inputs.sampled_token_ids, inputs.backup_token_ids
        last, _ = prepare_next_token(sampled, inputs.discard, backup, self.vocab_size, backend=self.backend)
        drafts = last.masked_fill(inputs.discard, PLACEHOLDER)[:, None]
        return Proposal(drafts if inputs.num_drafts else torch.empty_like(drafts[:, :0]))

    def layer_states(self, pages: Sequence[int], num_rows: int) -> torch.Tensor:
        return self.states.read(pages, num_rows).view(num_rows, len(self.aux_layer_ids), self.hidden_size)

    def poison(self, pages: Iterable[int]) -> None:
        self.states.poison(pages)
