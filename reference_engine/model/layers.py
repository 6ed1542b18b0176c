"""Layers of the Llama family over a paged KV cache. Weights are plain tensors; activations are [N, Q, width]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from reference_engine.cache.kv import AttentionContext
from reference_engine.model.config import ModelConfig
from reference_engine.model.loader import Checkpoint


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dim; reduced precision is normalised in float32, as in Hugging Face Llama."""
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


class RotaryEmbedding:
    """Rotary table in the rotate-half layout: [positions, 2, head_dim], cosines then signed sines.

    Angles are float32 whatever the model's dtype, as in Hugging Face.
    """

    def __init__(self, config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        frequencies = self._scaled(1.0 / (config.rope_theta**exponents), config)
        angles = torch.arange(num_positions).float()[:, None] * frequencies
        cos = torch.cat([angles.cos(), angles.cos()], dim=-1)
        sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
        self.table = torch.stack([cos, sin], dim=1).to(device, dtype)

    @staticmethod
    def _scaled(frequencies: torch.Tensor, config: ModelConfig) -> torch.Tensor:
        scaling = config.rope_scaling
        if scaling["rope_type"] == "linear":
            return frequencies / float(scaling["factor"])
        if scaling["rope_type"] == "llama3":
            # Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated.
            low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
            turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
            keep = ((turns - low) / (high - low)).clamp(0, 1)
            return keep * frequencies + (1 - keep) * frequencies / float(scaling["factor"])
        return frequencies

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """[N, Q] positions -> [N, Q, 2, 1, head_dim], to be handed to every layer of a forward pass."""
        return self.table[positions][:, :, :, None]


def apply_rotary(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """x [N, Q, heads, head_dim] turned by its position."""
    half = x.shape[-1] // 2
    swapped = x.roll(half, dims=-1)
    return x * rotary[:, :, 0] + swapped * rotary[:, :, 1]


class Attention:
    """Grouped-query attention; `input_size` differs from hidden_size in EAGLE3's first layer."""

    def __init__(self, config: ModelConfig, weights: Checkpoint, prefix: str, input_size: int | None = None) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        self.config = config
        sizes = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
        fan_in = input_size or hidden
        self.qkv = torch.cat([weights.take(f"{prefix}.{n}_proj.weight", size, fan_in) for n, size in sizes.items()])
        self.qkv_bias = (
            torch.cat([weights.take(f"{prefix}.{n}_proj.bias", size) for n, size in sizes.items()])
            if config.qkv_bias
            else None
        )
        self.o = weights.take(f"{prefix}.o_proj.weight", hidden, sizes["q"])
        self.o_bias = weights.take(f"{prefix}.o_proj.bias", hidden) if config.o_bias else None
        self.q_norm = weights.take(f"{prefix}.q_norm.weight", dim) if config.qk_norm else None
        self.k_norm = weights.take(f"{prefix}.k_norm.weight", dim) if config.qk_norm else None

    def __call__(
        self, x: torch.Tensor, rotary: torch.Tensor, context: AttentionContext, cache: torch.Tensor
    ) -> torch.Tensor:
        """Write this pass's keys and values into `cache` [slots, 2, kv_heads, head_dim], then attend over it."""
        config = self.config
        rows, queries, _ = x.shape
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = F.linear(x, self.qkv, self.qkv_bias).view(rows, queries, heads + 2 * kv_heads, dim)
        qk, v = qkv[:, :, : heads + kv_heads], qkv[:, :, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(qk[:, :, :heads], self.q_norm, config.rms_norm_eps)
            k = rms_norm(qk[:, :, heads:], self.k_norm, config.rms_norm_eps)
            qk = torch.cat([q, k], dim=2)
        qk = apply_rotary(qk, rotary)
        q, k = qk[:, :, :heads], qk[:, :, heads:]
        cache[context.write_slots] = torch.stack([k, v], dim=2).flatten(0, 1)
        visible = cache.index_select(0, context.read_slots).view(rows, -1, 2, kv_heads, dim)
        keys, values = visible.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=context.mask, enable_gqa=heads != kv_heads
        )
        return F.linear(out.transpose(1, 2).reshape(rows, queries, heads * dim), self.o, self.o_bias)


class MLP:
    """SwiGLU."""

    def __init__(self, config: ModelConfig, weights: Checkpoint, prefix: str) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = torch.cat([weights.take(f"{prefix}.{n}_proj.weight", inner, hidden) for n in ("gate", "up")])
        self.down = weights.take(f"{prefix}.down_proj.weight", hidden, inner)
        self.gate_up_bias: torch.Tensor | None = None
        self.down_bias: torch.Tensor | None = None
        if config.mlp_bias:
            self.gate_up_bias = torch.cat([weights.take(f"{prefix}.{n}_proj.bias", inner) for n in ("gate", "up")])
            self.down_bias = weights.take(f"{prefix}.down_proj.bias", hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down, self.down_bias)


class DecoderLayer:
    """Pre-norm decoder layer. EAGLE leaves the input norm of its first layer out (`input_norm=False`)."""

    def __init__(self, config: ModelConfig, weights: Checkpoint, prefix: str, *, input_norm: bool = True) -> None:
        hidden = config.hidden_size
        self.eps = config.rms_norm_eps
        self.input_norm = weights.take(f"{prefix}.input_layernorm.weight", hidden) if input_norm else None
        self.attention = Attention(config, weights, f"{prefix}.self_attn")
        self.post_norm = weights.take(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.mlp = MLP(config, weights, f"{prefix}.mlp")

    def __call__(
        self, x: torch.Tensor, rotary: torch.Tensor, context: AttentionContext, cache: torch.Tensor
    ) -> torch.Tensor:
        normed = x if self.input_norm is None else rms_norm(x, self.input_norm, self.eps)
        x = x + self.attention(normed, rotary, context, cache)
        return x + self.mlp(rms_norm(x, self.post_norm, self.eps))
