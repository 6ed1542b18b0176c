"""EAGLE: one decoder layer over fc(embedding, feature), sharing the target's embeddings and head (Li et al. 2024)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from reference_engine.cache.kv import AttentionContext, KVCache
from reference_engine.config import EngineConfig
from reference_engine.drafters.feature import FeatureDrafter
from reference_engine.model.causal_lm import CausalLM
from reference_engine.model.config import ModelConfig
from reference_engine.model.layers import DecoderLayer, Linear
from reference_engine.model.loader import Checkpoint
from reference_engine.sampling.random import RandomSource


class EagleDrafter(FeatureDrafter):
    """The first layer has no input norm and there is no final norm: the residual stream is the next feature."""

    def __init__(self, config: EngineConfig, target: CausalLM, random: RandomSource, num_positions: int) -> None:
        assert config.spec is not None
        if config.spec.model is None:
            raise ValueError("model=None: EAGLE needs the folder of its draft head")
        model = ModelConfig.load(config.spec.model)
        if model.architecture not in ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM"):
            raise ValueError(f"{config.spec.model}: architectures={model.architecture!r} is not an EAGLE head")
        for name in ("hidden_size", "vocab_size"):
            theirs, ours = getattr(target.config, name), getattr(model, name)
            if ours != theirs:
                raise ValueError(f"{config.spec.model}: {name}={ours} must equal the target's {theirs}")
        super().__init__(config, model, target, random, num_positions)
        weights = Checkpoint(config.spec.model, config.torch_dtype, self.device)
        hidden = model.hidden_size
        self.target = target
        bias = weights.take_optional("fc.bias", hidden)
        self.fc = Linear([weights.take("fc.weight", hidden, 2 * hidden)], [] if bias is None else [bias])
        own_embedding = weights.take_optional("embed_tokens.weight", model.vocab_size, hidden)
        self.embed_tokens = target.embed_tokens if own_embedding is None else own_embedding
        self.layers = [DecoderLayer(model, weights, f"layers.{i}", input_norm=i > 0) for i in range(model.num_layers)]
        weights.take_optional("lm_head.weight", model.vocab_size, hidden)
        weights.finish()
        self.cache = self.new_cache(model.num_layers)

    def caches(self) -> list[KVCache]:
        return [self.cache]

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, context: AttentionContext, stage: int
    ) -> torch.Tensor:
        assert stage == 0
        embedding = F.embedding(token_ids, self.embed_tokens)
        x = self.fc(torch.cat([embedding, features], dim=-1))
        rotary = self.rotary(context.positions)
        for layer, cache in zip(self.layers, self.cache.layers, strict=True):
            x = layer(x, rotary, context, cache)
        return x

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.target.logits(outputs)
