"""Layers of the Llama family for training: dense, in PyTorch modules whose parameters have the names of a checkpoint.

Shapes: activations [B, T, width]; keys and values [B, kv_heads, T, head_dim].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.known_answer.blocks import ROPE_THETA, Shape

EPS = 1e-5
KeysValues = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)


def rotary(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, heads, T, head_dim] turned by positions [T], in the rotate-half layout."""
    half = x.shape[-1] // 2
    frequencies = ROPE_THETA ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def seen(length: int, steps: int) -> Tensor:
    """Who sees whom, [length, steps * length] bool: in the first step's rows a row sees itself and those before, in the
    rows of later draft steps itself alone, since every row drafts a continuation of its own."""
    own = torch.eye(length, dtype=torch.bool)
    return torch.cat([torch.ones_like(own).tril(), *[own] * (steps - 1)], dim=1)


class Attention(nn.Module):
    """Grouped-query attention. `past` holds keys and values of earlier draft steps and receives those of this one."""

    def __init__(self, shape: Shape, *, input_size: int | None = None, bias: bool = False) -> None:
        super().__init__()
        width, dim = input_size or shape.hidden_size, shape.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(width, shape.num_heads * dim, bias=bias)
        self.k_proj = nn.Linear(width, shape.num_kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(width, shape.num_kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(shape.num_heads * dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, past: list[KeysValues]) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in projections)
        past.append((rotary(key, positions), value))
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*past, strict=True))
        alone = len(past) == 1
        out = F.scaled_dot_product_attention(
            rotary(query, positions),
            keys,
            values,
            attn_mask=None if alone else seen(x.shape[1], len(past)),
            is_causal=alone,
            enable_gqa=True,
        )
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer; EAGLE leaves the input norm out."""

    def __init__(self, shape: Shape, *, input_norm: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size) if input_norm else nn.Identity()
        self.self_attn = Attention(shape, bias=bias)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, positions: Tensor, past: list[KeysValues]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, past)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def initialise(module: nn.Module, deviation: float = 0.05) -> None:
    """Draw every matrix that is to be trained from a normal law; biases are 0 and norms 1."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            nn.init.normal_(parameter, std=deviation)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
