"""What the feature drafters (EAGLE, EAGLE3, MTP) have in common: row p pairs the target's feature at p with the token
after p, predicts the token after that, and recurs on its own output."""

from __future__ import annotations

from abc import abstractmethod

import torch

from kernels.shift_append import shift_append
from reference_engine.cache.kv import AttentionContext, KVCache
from reference_engine.config import EngineConfig
from reference_engine.drafters.base import Drafting, InputShadow, ModelDrafter, ProposeInputs
from reference_engine.model.causal_lm import CausalLM
from reference_engine.model.config import ModelConfig
from reference_engine.model.layers import RotaryEmbedding
from reference_engine.sampling.random import RandomSource


class FeatureDrafter(ModelDrafter):
    """Subclasses load their layers and define `features_of`, `forward` and `logits`."""

    base_offset = -1
    lookahead = 1

    def __init__(
        self, config: EngineConfig, model: ModelConfig, target: CausalLM, random: RandomSource, num_positions: int
    ) -> None:
        assert config.spec is not None
        super().__init__(config.spec, target.config.vocab_size, random, config.backend)
        self.device = torch.device(config.device)
        self.model_config = model
        self.max_positions = model.max_positions
        self.rotary = RotaryEmbedding(model, num_positions, config.torch_dtype, self.device)
        self._engine_config = config

    def new_cache(self, num_layers: int) -> KVCache:
        config, model = self._engine_config, self.model_config
        cache = KVCache(config, model, num_layers)
        if config.snapshots:
            slots = cache.num_slots
            self.shadow = InputShadow(torch.full((slots,), -1), torch.zeros(slots, model.hidden_size))
        return cache

    def features_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Target states [N, Q, width] -> feature rows [N, Q, hidden]."""
        return hidden

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, context: AttentionContext, stage: int
    ) -> torch.Tensor:
        """Tokens [T] and feature rows [T, hidden] of a pass -> output rows, fed back as the next features. `stage` is
        the draft step's module, for drafters that have several (MTP)."""

    @abstractmethod
    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Output rows [..., hidden] -> logits over the drafter's vocabulary."""

    def ingest(self, inputs: ProposeInputs, next_token_ids: torch.Tensor) -> Drafting:
        columns = torch.arange(inputs.token_ids.shape[1], device=inputs.rows.device)
        last = (inputs.num_rows - 1).clamp(min=0)[:, None]
        token_ids = shift_append(inputs.token_ids, inputs.num_rows, next_token_ids, backend=self.backend)
        positions, valid = inputs.positions, columns < inputs.num_rows[:, None]
        if inputs.max_seq_len > self.model_config.max_positions:
            valid &= positions < self.model_config.max_positions
        context = self.context(inputs, positions, inputs.max_seq_len, valid=valid)
        outputs = self.run(token_ids, self.features_of(inputs.hidden), context)
        features = outputs.gather(1, last[:, :, None].expand(-1, 1, outputs.shape[2]))[:, 0]
        return Drafting(self.logits(features), features)

    def step(
        self, token_ids: torch.Tensor, features: torch.Tensor, context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.run(token_ids, features, context, self.num_ingest_steps - 1)
        return self.logits(outputs), outputs

    def run(
        self, token_ids: torch.Tensor, features: torch.Tensor, context: AttentionContext, stage: int = 0
    ) -> torch.Tensor:
        self.num_forwards += 1
        if stage == 0:
            self.remember(context, token_ids, features)
        flat = self.forward(token_ids.reshape(-1), features.reshape(-1, features.shape[-1]), context, stage)
        return flat.view(*token_ids.shape, -1)
