"""EAGLE3: features from several target layers, a head of its own over a reduced vocabulary (Li et al. 2025)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from reference_engine.cache.kv import AttentionContext, KVCache
from reference_engine.config import EngineConfig
from reference_engine.drafters.feature import FeatureDrafter
from reference_engine.model.causal_lm import CausalLM
from reference_engine.model.config import ModelConfig
from reference_engine.model.layers import MLP, Attention, Linear, RMSNorm
from reference_engine.model.loader import Checkpoint
from reference_engine.sampling.random import RandomSource


class Eagle3Drafter(FeatureDrafter):
    """The only layer attends over cat(norm(embedding), norm(feature)); the residual stream is the feature, and before
    the final norm it is also what recurs. `d2t` [draft vocab]: target id = draft id + d2t[draft id]."""

    def __init__(self, config: EngineConfig, target: CausalLM, random: RandomSource, num_positions: int) -> None:
        assert config.spec is not None
        if config.spec.model is None:
            raise ValueError("model=None: EAGLE3 needs the folder of its draft head")
        model = ModelConfig.load(config.spec.model)
        _check(model, target.config)
        super().__init__(config, model, target, random, num_positions)
        weights = Checkpoint(config.spec.model, config.torch_dtype, self.device)
        hidden, vocab = model.hidden_size, model.draft_vocab_size or model.vocab_size
        self.aux_layer_ids = model.aux_layer_ids
        eps = model.rms_norm_eps
        own_embedding = weights.take_optional("embed_tokens.weight", model.vocab_size, hidden)
        self.embed_tokens = target.embed_tokens if own_embedding is None else own_embedding
        self.fc = Linear([weights.take("fc.weight", hidden, len(self.aux_layer_ids) * target.config.hidden_size)])
        # Of the embedding and of the feature, both at once.
        norms = [weights.take(f"midlayer.{name}.weight", hidden) for name in ("input_layernorm", "hidden_norm")]
        self.input_norms = RMSNorm(torch.stack(norms), eps)
        self.attention = Attention(model, weights, "midlayer.self_attn", input_size=2 * hidden)
        self.post_norm = RMSNorm(weights.take("midlayer.post_attention_layernorm.weight", hidden), eps)
        self.mlp = MLP(model, weights, "midlayer.mlp")
        self.norm = RMSNorm(weights.take("norm.weight", hidden), eps)
        self.lm_head = Linear([weights.take("lm_head.weight", vocab, hidden)])
        self.target_ids = self._target_ids(weights, vocab, model.vocab_size)
        weights.finish()
        self.cache = self.new_cache(1)

    def _target_ids(self, weights: Checkpoint, draft_vocab: int, vocab: int) -> torch.Tensor:
        ids = torch.arange(draft_vocab, device=self.device)
        if "d2t" in weights:
            ids = ids + weights.take("d2t", draft_vocab, integer=True)
        elif draft_vocab != vocab:
            raise ValueError(
                f"{weights.path}: tensor 'd2t' is missing; a reduced draft vocabulary ({draft_vocab}) needs it"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != draft_vocab:
            raise ValueError(
                f"{weights.path}: d2t must hold offsets (target id - draft id) onto distinct ids below {vocab}"
            )
        if "t2d" in weights:
            mask = torch.zeros(vocab, dtype=torch.bool, device=self.device)
            mask[ids] = True
            if not torch.equal(weights.take("t2d", vocab, integer=True).bool(), mask):
                raise ValueError(f"{weights.path}: t2d disagrees with d2t about the target ids in the draft vocabulary")
        return ids

    def caches(self) -> list[KVCache]:
        return [self.cache]

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return self.target_ids.take(draft_ids)

    def features_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, context: AttentionContext, stage: int
    ) -> torch.Tensor:
        assert stage == 0
        both = self.input_norms(torch.stack([F.embedding(token_ids, self.embed_tokens), features], dim=1)).flatten(1)
        x = self.attention(both, self.rotary(context.positions), context, self.cache.layers[0], residual=features)
        return self.mlp(self.post_norm(x), residual=x)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        normed = self.norm(outputs)
        logits = self.lm_head(normed.reshape(-1, normed.shape[-1])).view(*normed.shape[:-1], -1)
        return logits if logits.dtype == torch.float64 else logits.float()


def _check(model: ModelConfig, target: ModelConfig) -> None:
    if model.architecture not in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"):
        raise ValueError(f"{model.path}: architectures={model.architecture!r} is not an EAGLE3 head")
    if model.num_layers != 1:
        raise ValueError(f"{model.path}: num_hidden_layers={model.num_layers} must be 1")
    if model.vocab_size != target.vocab_size:
        raise ValueError(f"{model.path}: vocab_size={model.vocab_size} must equal the target's {target.vocab_size}")
    if model.target_hidden_size != target.hidden_size:
        raise ValueError(
            f"{model.path}: target_hidden_size={model.target_hidden_size} must equal the target's {target.hidden_size}"
        )
    if not model.aux_layer_ids:
        raise ValueError(f"{model.path}: eagle_aux_hidden_state_layer_ids is missing; name the target layers to read")
    bad = [layer for layer in model.aux_layer_ids if not 0 <= layer <= target.num_layers]
    if bad:
        raise ValueError(
            f"{model.path}: eagle_aux_hidden_state_layer_ids={list(model.aux_layer_ids)}: {bad} lie outside "
            f"0..{target.num_layers} of the target"
        )
