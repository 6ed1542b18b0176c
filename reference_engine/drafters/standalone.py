"""STANDALONE: an ordinary language model with the target's vocabulary drafts token by token (Leviathan et al. 2023)."""

from __future__ import annotations

import torch

from reference_engine.cache.kv import AttentionContext, KVCache
from reference_engine.config import EngineConfig
from reference_engine.drafters.base import Drafting, InputShadow, ModelDrafter, ProposeInputs
from reference_engine.model.causal_lm import CausalLM
from reference_engine.sampling.random import RandomSource


class StandaloneDrafter(ModelDrafter):
    """Draft KV row p holds the token at p; the last committed token is fed while ingesting."""

    base_offset = 0
    lookahead = 0

    def __init__(self, config: EngineConfig, target: CausalLM, random: RandomSource, num_positions: int) -> None:
        assert config.spec is not None
        if config.spec.model is None:
            raise ValueError("model=None: STANDALONE needs the folder of a draft model")
        super().__init__(config.spec, target.config.vocab_size, random, config.backend)
        device = torch.device(config.device)
        self.model = CausalLM(config.spec.model, config.torch_dtype, device, num_positions)
        self.model.finish_loading(with_mtp=False)
        if self.model.config.recurrent_layers:
            raise ValueError(
                f"{config.spec.model}: a draft model with recurrent layers would need its states rolled back as the "
                "target's are; use one without"
            )
        if self.model.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"{config.spec.model}: vocab_size={self.model.config.vocab_size} of the draft model must equal the "
                f"target's {target.config.vocab_size}"
            )
        self.max_positions = self.model.config.max_positions
        self.cache = KVCache(config, self.model.config, self.model.config.num_layers)
        if config.snapshots:
            slots = self.cache.num_slots
            self.shadow = InputShadow(torch.full((slots,), -1), torch.zeros(slots, 0))

    def caches(self) -> list[KVCache]:
        return [self.cache]

    def ingest(self, inputs: ProposeInputs, next_token_ids: torch.Tensor) -> Drafting:
        rows, queries = inputs.token_ids.shape
        columns = torch.arange(queries + 1, device=inputs.rows.device)
        token_ids = torch.cat([inputs.token_ids, torch.zeros_like(inputs.rows)[:, None]], dim=1)
        token_ids = token_ids.scatter(1, inputs.num_rows[:, None], next_token_ids[:, None])
        positions = inputs.positions[:, :1] + columns
        valid = (columns <= inputs.num_rows[:, None]) & (positions < self.model.config.max_positions)
        context = self.context(inputs, positions, inputs.max_seq_len, valid=valid)
        logits, features = self.step(token_ids, inputs.hidden.new_zeros(rows, queries + 1, 0), context)
        last = inputs.num_rows[:, None, None].expand(-1, 1, logits.shape[2])
        return Drafting(logits.gather(1, last)[:, 0], features[:, 0])

    def step(
        self, token_ids: torch.Tensor, features: torch.Tensor, context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_forwards += 1
        self.remember(context, token_ids, features)
        hidden, _ = self.model.forward(token_ids, context, self.cache)
        return self.model.logits(hidden), features
