"""CUSTOM: drafts come from a Python function. For tests (scripted acceptance, hostile drafters) and experiments."""

from __future__ import annotations

import torch

from reference_engine.config import EngineConfig
from reference_engine.drafters.base import Drafter, Proposal, ProposeInputs
from reference_engine.model.causal_lm import CausalLM
from reference_engine.pool import PLACEHOLDER
from reference_engine.sampling.random import RandomSource


class CustomDrafter(Drafter):
    """`script(request_id, committed token ids, k)` returns up to k ids; what it leaves out is no draft. It is not asked
    where none is wanted."""

    def __init__(self, config: EngineConfig, target: CausalLM, random: RandomSource, num_positions: int) -> None:
        del target, random, num_positions
        assert config.spec is not None
        if config.spec.script is None:
            raise ValueError("script=None: CUSTOM needs a function (request_id, token_ids, k) -> draft token ids")
        if config.spec.topk > 1:
            raise ValueError(f"topk={config.spec.topk}: CUSTOM drafts chains only; use topk=1")
        if config.spec.draft_sample_method != "greedy":
            raise ValueError(
                f"draft_sample_method={config.spec.draft_sample_method!r}: a script draws from no law that "
                "verification could weigh; CUSTOM must use 'greedy'"
            )
        self.script = config.spec.script

    def propose(self, inputs: ProposeInputs) -> Proposal:
        drafts = torch.full((len(inputs.rows), inputs.num_drafts), PLACEHOLDER, dtype=torch.long)
        tokens = inputs.history[inputs.rows].tolist()
        lengths, discard = inputs.seq_lens.tolist(), inputs.discard.tolist()
        limits = torch.minimum(inputs.draft_limits, inputs.room).clamp(max=inputs.num_drafts).tolist()
        for index, request_id in enumerate(inputs.request_ids):
            if limits[index] and not discard[index]:
                committed = tuple(tokens[index][: lengths[index]])
                chosen = list(self.script(request_id, committed, limits[index]))[: limits[index]]
                drafts[index, : len(chosen)] = torch.tensor(chosen, dtype=torch.long)
        return Proposal(drafts.to(inputs.rows.device))
