"""FROZEN_KV_MTP: an assistant that attends to the target's KV and never writes any (Gemma 4's, under SGLang's name).

A draft step merges the embedding of a token with a row: at first the bonus token with the target's row that predicted
it, then each draft with the assistant's own output. Layers have queries alone; keys and values are those that a target
layer has written for the committed tokens. Every step stands at the same position, that of the last such KV.

The checkpoint has the tensors of `gemma4_assistant` (`pre_projection`, `model.layers.{i}` without keys and values,
`model.norm`, `post_projection`, `lm_head`) on Llama's layers: SwiGLU, two norms, scores over the root of head_dim. The
embeddings are the target's, unscaled. `target_kv_layer_ids` names the target layer that each layer reads; left out, all
read the last.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from reference_engine.cache.kv import AttentionContext, KVLayer, attention_context
from reference_engine.config import EngineConfig, pages_for, require
from reference_engine.drafters.base import Drafting, Proposal, ProposeInputs
from reference_engine.drafters.last_row import LastRowDrafter, last_positions
from reference_engine.model.causal_lm import CausalLM
from reference_engine.model.config import ModelConfig, integers, read_raw
from reference_engine.model.layers import MLP, Linear, RMSNorm, Rotary, RotaryEmbedding, apply_rotary, attend
from reference_engine.model.loader import Checkpoint
from reference_engine.sampling.random import RandomSource

ARCHITECTURE = "LlamaForCausalLMFrozenKVMTP"
SHARED = ("num_kv_heads", "head_dim", "rope_theta", "rope_scaling", "vocab_size")
"""What must be as in the target, whose keys and values are read as they are."""


_Frozen = tuple[AttentionContext, list[KVLayer]]
"""What a step may see, and the KV of each layer."""


class _Layer:
    """A pre-norm decoder layer whose attention has no keys and values of its own."""

    def __init__(self, config: ModelConfig, weights: Checkpoint, prefix: str) -> None:
        hidden, width = config.hidden_size, config.num_heads * config.head_dim
        self.shape = (-1, config.num_heads, config.head_dim)
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(weights.take(f"{prefix}.input_layernorm.weight", hidden), eps)
        biases = [weights.take(f"{prefix}.self_attn.q_proj.bias", width)] if config.qkv_bias else []
        self.q = Linear([weights.take(f"{prefix}.self_attn.q_proj.weight", width, hidden)], biases)
        biases = [weights.take(f"{prefix}.self_attn.o_proj.bias", hidden)] if config.o_bias else []
        self.o = Linear([weights.take(f"{prefix}.self_attn.o_proj.weight", hidden, width)], biases)
        self.post_norm = RMSNorm(weights.take(f"{prefix}.post_attention_layernorm.weight", hidden), eps)
        self.mlp = MLP(config, weights, f"{prefix}.mlp")

    def __call__(self, x: torch.Tensor, rotary: Rotary, context: AttentionContext, cache: KVLayer) -> torch.Tensor:
        query = apply_rotary(self.q(self.input_norm(x)).view(self.shape), rotary)
        x = self.o(attend(query, context, cache), residual=x)
        return self.mlp(self.post_norm(x), residual=x)


class FrozenKVMTPDrafter(LastRowDrafter):
    def __init__(self, config: EngineConfig, target: CausalLM, random: RandomSource, num_positions: int) -> None:
        spec = config.spec
        assert spec is not None
        if spec.model is None:
            raise ValueError("model=None: FROZEN_KV_MTP needs the folder of its assistant")
        require(spec.topk == 1, "topk", spec.topk, "FROZEN_KV_MTP drafts chains only; use topk=1")
        super().__init__(config, target, random)
        model, device = ModelConfig.load(spec.model), torch.device(config.device)
        self.kv_layer_ids = _kv_layer_ids(model, target.config)
        self.target = target
        weights = Checkpoint(spec.model, config.torch_dtype, device)
        hidden, backbone = model.hidden_size, target.config.hidden_size
        self.pre_projection = Linear([weights.take("pre_projection.weight", hidden, 2 * backbone)])
        self.layers = [_Layer(model, weights, f"model.layers.{i}") for i in range(model.num_layers)]
        self.norm = RMSNorm(weights.take("model.norm.weight", hidden), model.rms_norm_eps)
        self.post_projection = Linear([weights.take("post_projection.weight", backbone, hidden)])
        self.lm_head = Linear([weights.take("lm_head.weight", model.vocab_size, hidden)])
        weights.finish()
        self.rotary = RotaryEmbedding(target.config, num_positions, config.torch_dtype, device)

    def ingest(self, inputs: ProposeInputs, next_token_ids: torch.Tensor) -> Drafting:
        return self._step(next_token_ids, self.last_row(inputs, next_token_ids), self._context(inputs))

    def draft(self, inputs: ProposeInputs, drafting: Drafting) -> Proposal:
        context = self._context(inputs)
        token = self.choose(inputs, drafting)
        for _ in range(inputs.num_steps - 1):
            following = self._step(token, drafting.features, context)
            drafting.logits, drafting.features = following.logits, following.features
            token = self.choose(inputs, drafting)
        return self.chain(inputs, drafting)

    def _context(self, inputs: ProposeInputs) -> _Frozen:
        """The target's KV up to the row that predicted the bonus token, where every step stands."""
        cache = inputs.target_cache
        num_pages = pages_for(inputs.max_seq_len, cache.page_size)
        context = attention_context(cache, inputs.block_table, last_positions(inputs), num_pages)
        return context, [cache.layers[layer] for layer in self.kv_layer_ids]

    def _step(self, token_ids: torch.Tensor, rows: torch.Tensor, frozen: _Frozen) -> Drafting:
        """Tokens [N] with rows [N, backbone] -> logits [N, vocab] and the rows that the next step is fed."""
        self.num_forwards += 1
        context, caches = frozen
        rotary = self.rotary(context.positions)
        x = self.pre_projection(torch.cat([F.embedding(token_ids, self.target.embed_tokens), rows], dim=-1))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rotary, context, cache)
        x = self.norm(x)
        logits = self.lm_head(x)
        return Drafting(logits if logits.dtype == torch.float64 else logits.float(), self.post_projection(x))


def _kv_layer_ids(model: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """Target layer by layer of the assistant. Raises ValueError when the two do not fit together."""
    if model.architecture != ARCHITECTURE:
        raise ValueError(f"{model.path}: architectures={model.architecture!r} is not a frozen-KV assistant")
    for name in SHARED:
        ours, theirs = getattr(model, name), getattr(target, name)
        if ours != theirs:
            raise ValueError(f"{model.path}: {name}={ours} must equal the target's {theirs}")
    backbone = read_raw(model.path).get("backbone_hidden_size")
    if backbone != target.hidden_size:
        raise ValueError(f"{model.path}: backbone_hidden_size={backbone} must equal the target's {target.hidden_size}")
    last = target.num_layers - 1
    layers = read_raw(model.path).get("target_kv_layer_ids", [last] * model.num_layers)
    if not integers(layers, 0, target.num_layers) or len(layers) != model.num_layers:
        right = f"must name {model.num_layers} of the target's layers 0..{last}, one for each of the assistant's"
        raise ValueError(f"{model.path}: target_kv_layer_ids={layers}: {right}")
    return tuple(layers)
