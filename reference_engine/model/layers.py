"""Layers of the Llama family over a paged KV cache. Weights are plain tensors; activations are flat: [T, width] for the
T = N * Q tokens of a pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels.paged_attention import paged_attention
from reference_engine.cache.kv import AttentionContext, KVLayer
from reference_engine.model.config import ModelConfig
from reference_engine.model.loader import Checkpoint
from reference_engine.model.packed import packed

Rotary = tuple[torch.Tensor, torch.Tensor]


class Linear:
    """x [T, in] -> [T, out]; projections of one input can be stacked. Kept transposed: the product is faster so."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()) -> None:
        self.weight = torch.cat(list(weights)).t().contiguous()
        self.bias = torch.cat(list(biases)) if biases else None
        self._packed = packed(self.weight)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The projection, added to `residual` [T, out] where there is one."""
        added = residual
        if self.bias is not None:
            added = self.bias if residual is None else residual + self.bias
        if self._packed is not None and not torch.compiler.is_compiling():
            out = self._packed.multiply(x, added)
            if out is not None:
                return out
        return torch.mm(x, self.weight) if added is None else torch.addmm(added, x, self.weight)


class RMSNorm:
    """Root-mean-square norm over the last dim; reduced precision is normalised in float32, as Hugging Face does."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        # Of no dimensions: it takes on the precision of what it is added to.
        self.eps = torch.tensor(eps, dtype=torch.float64, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        # Spelled out in few operations: half the time of the library's own rms_norm on a CPU at these sizes.
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        normed = wide * torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (normed if wide is x else normed.to(x.dtype)).mul_(self.weight)


class RotaryEmbedding:
    """Rotary tables in the rotate-half layout, [positions, 1, head_dim]: cosines, and sines signed by half.

    Angles are float32 whatever the model's dtype, as in Hugging Face.
    """

    def __init__(self, config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        frequencies = self._scaled(1.0 / (config.rope_theta**exponents), config)
        angles = torch.arange(num_positions).float()[:, None] * frequencies
        self.cos = torch.cat([angles.cos(), angles.cos()], dim=-1)[:, None].to(device, dtype)
        self.sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)[:, None].to(device, dtype)

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

    def __call__(self, positions: torch.Tensor) -> Rotary:
        """[N, Q] positions -> cosines and sines [T, 1, head_dim], to be handed to every layer of a pass."""
        flat = positions.reshape(-1)
        return self.cos.index_select(0, flat), self.sin.index_select(0, flat)


def apply_rotary(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """x [T, heads, head_dim] turned by its position, in place."""
    cos, sin = rotary
    crosswise = x.roll(x.shape[-1] // 2, dims=-1)
    return x.mul_(cos).addcmul_(crosswise, sin)


def attend(query: torch.Tensor, context: AttentionContext, cache: KVLayer) -> torch.Tensor:
    """query [T, heads, dim], turned by its positions, over what `cache` holds -> [T, heads * dim]. Writes nothing."""
    (rows, queries), (_, heads, dim) = context.positions.shape, query.shape
    if cache.backend == "triton":
        out = paged_attention(
            query,
            cache.pages,
            context.read_pages,
            context.cache_positions,
            window_start=context.window_start,
            window_mask=context.window_mask,
            backend=cache.backend,
        )
        return out.flatten(1)
    # The kernel's reference in fewer and faster operations, for KV that is finite where nobody looks.
    keys, values = cache.gather(context.read_pages)
    q = query.view(rows, queries, heads, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=context.bias, enable_gqa=True)
    return out.transpose(1, 2).reshape(-1, heads * dim)


class Attention:
    """Grouped-query attention; `input_size` differs from hidden_size in EAGLE3's first layer."""

    def __init__(self, config: ModelConfig, weights: Checkpoint, prefix: str, input_size: int | None = None) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        self.config = config
        sizes = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
        fan_in = input_size or hidden
        projections = [weights.take(f"{prefix}.{n}_proj.weight", size, fan_in) for n, size in sizes.items()]
        biases = [weights.take(f"{prefix}.{n}_proj.bias", size) for n, size in sizes.items() if config.qkv_bias]
        self.qkv = Linear(projections, biases)
        o_biases = [weights.take(f"{prefix}.o_proj.bias", hidden)] if config.o_bias else []
        self.o = Linear([weights.take(f"{prefix}.o_proj.weight", hidden, sizes["q"])], o_biases)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(weights.take(f"{prefix}.q_norm.weight", dim), config.rms_norm_eps)
            self.k_norm = RMSNorm(weights.take(f"{prefix}.k_norm.weight", dim), config.rms_norm_eps)

    def __call__(
        self, x: torch.Tensor, rotary: Rotary, context: AttentionContext, cache: KVLayer, residual: torch.Tensor
    ) -> torch.Tensor:
        """Write this pass's keys and values into `cache`, then attend over it. The output is
        added to `residual` [T, hidden]."""
        query, kv = self._project(x, rotary)
        cache.write(context.write_slots, kv)
        return self.o(attend(query, context, cache), residual)

    def write(self, x: torch.Tensor, rotary: Rotary, context: AttentionContext, cache: KVLayer) -> None:
        """Write keys and values alone."""
        _, kv = self._project(x, rotary)
        cache.write(context.write_slots, kv)

    def _project(self, x: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, heads, dim], keys and values [T, 2 * kv_heads, dim], normalised and turned."""
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = self.qkv(x).view(-1, heads + 2 * kv_heads, dim)
        qk = qkv[:, : heads + kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            qk[:, :heads] = self.q_norm(qk[:, :heads])
            qk[:, heads:] = self.k_norm(qk[:, heads:])
        apply_rotary(qk, rotary)
        return qkv[:, :heads], qkv[:, heads:]


class MLP:
    """SwiGLU."""

    def __init__(self, config: ModelConfig, weights: Checkpoint, prefix: str) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        names = ("gate", "up")
        self.gate_up = Linear(
            [weights.take(f"{prefix}.{name}_proj.weight", inner, hidden) for name in names],
            [weights.take(f"{prefix}.{name}_proj.bias", inner) for name in names if config.mlp_bias],
        )
        self.down = Linear(
            [weights.take(f"{prefix}.down_proj.weight", hidden, inner)],
            [weights.take(f"{prefix}.down_proj.bias", hidden)] if config.mlp_bias else [],
        )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        return self.down(F.silu(gate).mul_(up), residual)


class DecoderLayer:
    """Pre-norm decoder layer. EAGLE leaves the input norm of its first layer out (`input_norm=False`)."""

    def __init__(self, config: ModelConfig, weights: Checkpoint, prefix: str, *, input_norm: bool = True) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(weights.take(f"{prefix}.input_layernorm.weight", hidden), eps) if input_norm else None
        self.attention = Attention(config, weights, f"{prefix}.self_attn")
        self.post_norm = RMSNorm(weights.take(f"{prefix}.post_attention_layernorm.weight", hidden), eps)
        self.mlp = MLP(config, weights, f"{prefix}.mlp")

    def __call__(self, x: torch.Tensor, rotary: Rotary, context: AttentionContext, cache: KVLayer) -> torch.Tensor:
        normed = x if self.input_norm is None else self.input_norm(x)
        x = self.attention(normed, rotary, context, cache, residual=x)
        return self.mlp(self.post_norm(x), residual=x)
