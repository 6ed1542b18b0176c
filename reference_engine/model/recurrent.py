"""Gated linear attention (Yang et al. 2024) with one gate a head, beside the attention of a layer as in Falcon-H1 and
Hymba: both read the same normalised rows, both are added to the residual.

    S_t = g_t S_{t-1} + k_t v_t^T        g_t = sigmoid(W_g x_t + b_g), one for each head
    o_t = S_t^T q_t

There is no rotary embedding, no normaliser and no convolution. See `config.TARGETS` for the architecture.
"""

from __future__ import annotations

import torch

from reference_engine.cache.kv import AttentionContext, KVLayer
from reference_engine.model.config import ModelConfig
from reference_engine.model.layers import DecoderLayer, Linear, Rotary
from reference_engine.model.loader import Checkpoint


class GatedLinearAttention:
    """The state is computed in its own precision, float32 or wider."""

    def __init__(self, config: ModelConfig, weights: Checkpoint, prefix: str) -> None:
        hidden = config.hidden_size
        self.size = heads, key_dim, value_dim = config.recurrent_state_size
        widths = {"q": heads * key_dim, "k": heads * key_dim, "v": heads * value_dim}
        self.qkv = Linear(
            [weights.take(f"{prefix}.{name}_proj.weight", width, hidden) for name, width in widths.items()]
        )
        self.gate = Linear(
            [weights.take(f"{prefix}.g_proj.weight", heads, hidden)], [weights.take(f"{prefix}.g_proj.bias", heads)]
        )
        self.o = Linear([weights.take(f"{prefix}.o_proj.weight", hidden, heads * value_dim)])

    def __call__(self, x: torch.Tensor, context: AttentionContext, residual: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], added to `residual`. The states are left in the context's recurrent pass."""
        states = context.recurrent
        assert states is not None, "a model with recurrent layers runs with a recurrent pass"
        heads, key_dim, value_dim = self.size
        shape, wide = context.positions.shape, states.initial.dtype
        sizes = [heads * key_dim, heads * key_dim, heads * value_dim]
        q, k, v = torch.split(self.qkv(x).to(wide).view(*shape, -1), sizes, dim=-1)
        q, k = q.reshape(*shape, heads, key_dim, 1), k.reshape(*shape, heads, key_dim, 1)
        gates = self.gate(x).to(wide).sigmoid().view(*shape, heads)
        after = states.scan(gates, k * v.reshape(*shape, heads, 1, value_dim))
        out = (q * after).sum(dim=-2)
        return self.o(out.view(len(x), -1).to(x.dtype), residual)


class HybridLayer(DecoderLayer):
    """A decoder layer whose attention has recurrent heads beside it."""

    def __init__(self, config: ModelConfig, weights: Checkpoint, prefix: str) -> None:
        super().__init__(config, weights, prefix)
        self.recurrent = GatedLinearAttention(config, weights, f"{prefix}.recurrent")

    def __call__(self, x: torch.Tensor, rotary: Rotary, context: AttentionContext, cache: KVLayer) -> torch.Tensor:
        assert self.input_norm is not None
        normed = self.input_norm(x)
        x = self.attention(normed, rotary, context, cache, residual=x)
        x = self.recurrent(normed, context, residual=x)
        return self.mlp(self.post_norm(x), residual=x)
