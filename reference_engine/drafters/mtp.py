"""MTP: multi-token-prediction layers that come with the target (DeepSeek-V3 2024; tensor names of MiMo).

Layer 0 pairs the target's final-norm row at p with the token after p. Layer i takes layer i - 1's output at p and the
token at p + 1 + i. Draft step i uses layer i; past the last layer that one goes on, fed with its own output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from reference_engine.cache.kv import AttentionContext, KVCache, KVLayer
from reference_engine.config import EngineConfig
from reference_engine.drafters.base import Drafting, ProposeInputs
from reference_engine.drafters.feature import FeatureDrafter
from reference_engine.model.causal_lm import CausalLM
from reference_engine.model.layers import DecoderLayer, Linear, RMSNorm, Rotary
from reference_engine.sampling.random import RandomSource


class _MTPLayer:
    def __init__(self, target: CausalLM, index: int) -> None:
        config, weights = target.config, target.checkpoint
        assert weights is not None
        prefix, hidden = f"model.mtp_layers.{index}", config.hidden_size
        eps = config.rms_norm_eps
        self.embed_norm = RMSNorm(weights.take(f"{prefix}.token_layernorm.weight", hidden), eps)
        self.feature_norm = RMSNorm(weights.take(f"{prefix}.hidden_layernorm.weight", hidden), eps)
        self.input_proj = Linear([weights.take(f"{prefix}.input_proj.weight", hidden, 2 * hidden)])
        self.block = DecoderLayer(config, weights, prefix)
        self.final_norm = RMSNorm(weights.take(f"{prefix}.final_layernorm.weight", hidden), eps)

    def __call__(
        self,
        embedding: torch.Tensor,
        features: torch.Tensor,
        rotary: Rotary,
        context: AttentionContext,
        cache: KVLayer,
    ) -> torch.Tensor:
        both = [self.feature_norm(features), self.embed_norm(embedding)]
        x = self.block(self.input_proj(torch.cat(both, dim=-1)), rotary, context, cache)
        return self.final_norm(x)


class MTPDrafter(FeatureDrafter):
    """With L layers in use, the rows of the last L - 1 committed positions were made from drafts. They are made again
    once the tokens are known, so the target rows of these positions are kept in `tail` [rows, L - 1, hidden]."""

    memory = (*FeatureDrafter.memory, "tail")

    def __init__(self, config: EngineConfig, target: CausalLM, random: RandomSource, num_positions: int) -> None:
        assert config.spec is not None
        if config.spec.model is not None and config.spec.model != config.model:
            raise ValueError(f"model={str(config.spec.model)!r}: MTP layers come with the target; leave it out")
        if target.config.num_mtp_layers == 0:
            raise ValueError(f"{config.model}: num_nextn_predict_layers is 0 or missing: the target has no MTP layers")
        super().__init__(config, target.config, target, random, num_positions)
        if target.config.num_mtp_layers > 1 and config.spec.topk > 1:
            raise ValueError(f"topk={config.spec.topk}: several MTP layers draft chains only; use topk=1")
        self.target = target
        # Every layer is loaded, so that a damaged one is refused even when fewer steps than layers are drafted.
        layers = [_MTPLayer(target, i) for i in range(target.config.num_mtp_layers)]
        self.layers = layers[: config.spec.num_steps]
        self.lookahead = self.num_ingest_steps = len(self.layers)
        self.cache = self.new_cache(len(self.layers))
        tail = len(self.layers) - 1
        self.tail = torch.zeros(
            config.max_running + 1, tail, target.config.hidden_size, dtype=config.torch_dtype, device=self.device
        )

    def caches(self) -> list[KVCache]:
        return [self.cache]

    def ingest(self, inputs: ProposeInputs, next_token_ids: torch.Tensor) -> Drafting:
        tail = self.tail.shape[1]
        offsets = torch.arange(inputs.token_ids.shape[1] + tail, device=inputs.rows.device) - tail
        positions = inputs.positions[:, :1] + offsets
        valid = (positions >= inputs.computed_from[:, None]) & (offsets < inputs.num_rows[:, None])
        valid &= positions < self.model_config.max_positions
        context = self.context(inputs, positions, inputs.max_seq_len, valid=valid)
        outputs = torch.cat([self.tail[inputs.rows], inputs.hidden], dim=1)
        kept = inputs.num_rows[:, None] + torch.arange(tail, device=inputs.rows.device)
        self.tail[inputs.rows] = outputs.gather(1, kept[:, :, None].expand(-1, -1, outputs.shape[2]))
        last = (inputs.num_rows - 1 + tail).clamp(min=0)[:, None, None]
        drafting = Drafting(outputs[:, 0], outputs[:, 0])
        for index in range(len(self.layers)):
            token_ids = self._tokens_after(inputs, positions + 1 + index, next_token_ids, drafting)
            outputs = self.run(token_ids, outputs, context, index)
            drafting.features = outputs.gather(1, last.expand(-1, 1, outputs.shape[2]))[:, 0]
            drafting.logits = self.logits(drafting.features)
            if index < len(self.layers) - 1:
                self.choose(inputs, drafting)
        return drafting

    @staticmethod
    def _tokens_after(
        inputs: ProposeInputs, positions: torch.Tensor, next_token_ids: torch.Tensor, drafting: Drafting
    ) -> torch.Tensor:
        """Ids at `positions`: committed ones, the token just sampled, and drafts past the end."""
        width = inputs.history.shape[1]
        token_ids = inputs.history[inputs.rows].gather(1, positions.clamp(0, width - 1))
        following = inputs.positions[:, 0] + inputs.num_rows
        for offset, token in enumerate([next_token_ids, *drafting.tokens]):
            unknown = positions >= inputs.seq_lens[:, None] if offset else True
            here = (positions == (following + offset)[:, None]) & unknown
            token_ids = torch.where(here, token[:, None], token_ids)
        return token_ids

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, context: AttentionContext, stage: int
    ) -> torch.Tensor:
        embedding = F.embedding(token_ids, self.target.embed_tokens)
        rotary = self.rotary(context.positions)
        return self.layers[stage](embedding, features, rotary, context, self.cache.layers[stage])

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.target.logits(outputs)
