"""Dense forward passes, straight from a checkpoint's config and tensors: no cache, no batching, no paging.

An independent witness of the closed forms, and the reference for checkpoints that have none. Everything takes whole
sequences; row j sits at position j. Truth is float64; in a lower `dtype` every step is rounded as engines round it
(norms and softmax in float32).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from harness.known_answer.base import Config, Weights

Attend = Callable[[torch.Tensor], torch.Tensor]


def wide(rows: torch.Tensor) -> torch.Tensor:
    """Rows in the precision in which engines compute norms and softmax."""
    return rows if rows.dtype == torch.float64 else rows.float()


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wider = wide(rows)
    normed = wider * torch.rsqrt(wider.square().mean(-1, keepdim=True) + eps)
    return normed.to(rows.dtype) * weight


def rotate(heads: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding, rotate-half layout, of [n, heads, head_dim] rows at positions 0..n-1."""
    rows, _, dim = heads.shape
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(rows, dtype=torch.float64)[:, None, None] * frequency
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    first, second = heads[..., : dim // 2], heads[..., dim // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@dataclass(frozen=True, slots=True)
class Layers:
    """Decoder layers over one set of tensors; sizes come from `config`."""

    config: Config
    weights: Weights
    dtype: torch.dtype = torch.float64

    def tensor(self, name: str) -> torch.Tensor:
        return self.weights[name].to(self.dtype)

    @property
    def eps(self) -> float:
        return float(self.config["rms_norm_eps"])

    def linear(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        out = rows @ self.tensor(f"{name}.weight").T
        return out + self.tensor(f"{name}.bias") if f"{name}.bias" in self.weights else out

    def norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, self.tensor(f"{name}.weight"), self.eps)

    def attention(self, prefix: str, rows: torch.Tensor) -> torch.Tensor:
        """Causal self-attention of [n, width] rows."""
        dim, theta = int(self.config["head_dim"]), float(self.config["rope_theta"])
        n, kv_heads = len(rows), int(self.config["num_key_value_heads"])
        query, key, value = (self.linear(f"{prefix}.{name}_proj", rows).view(n, -1, dim) for name in "qkv")
        group = query.shape[1] // kv_heads
        query, key = rotate(query, theta), rotate(key, theta).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(dim)
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        peaks = wide(scores).masked_fill(~visible, -torch.inf).softmax(-1).to(self.dtype)
        mixed = torch.einsum("hqk,khd->qhd", peaks, value.repeat_interleave(group, 1))
        return self.linear(f"{prefix}.o_proj", mixed.reshape(n, -1))

    def mlp(self, prefix: str, rows: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear(f"{prefix}.gate_proj", rows), self.linear(f"{prefix}.up_proj", rows)
        return self.linear(f"{prefix}.down_proj", silu(gate) * up)

    def recurrent(self, prefix: str, rows: torch.Tensor) -> torch.Tensor:
        """Gated linear attention of [n, width] rows without a state: every pair of rows, weighed by the product of the
        gates between them."""
        n, heads = len(rows), int(self.config["recurrent_num_heads"])
        query, key, value = (self.linear(f"{prefix}.{name}_proj", rows).view(n, heads, -1) for name in "qkv")
        gates = wide(self.linear(f"{prefix}.g_proj", rows)).sigmoid().to(self.dtype)
        decay = torch.zeros(n, n, heads, dtype=self.dtype)
        for row in range(n):
            decay[row, :row] = decay[row - 1, :row] * gates[row]
            decay[row, row] = 1.0
        mixed = torch.einsum("qhk,shk,qsh,shd->qhd", query, key, decay, value)
        return self.linear(f"{prefix}.o_proj", mixed.reshape(n, -1))

    def decoder(self, prefix: str, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """One pre-norm layer: `attended` is what its attention reads, `residual` what it adds to."""
        residual = residual + self.attention(f"{prefix}.self_attn", attended)
        if f"{prefix}.recurrent.q_proj.weight" in self.weights:
            residual = residual + self.recurrent(f"{prefix}.recurrent", attended)
        return residual + self.mlp(f"{prefix}.mlp", self.norm(f"{prefix}.post_attention_layernorm", residual))


@dataclass(frozen=True, slots=True)
class TargetStates:
    """`entering[i]` is the residual that enters layer i (the last one leaves the last layer), `hidden` the final-norm
    rows, all [n, hidden_size]; `logprobs` [n, V] is the law of the token after each row."""

    entering: tuple[torch.Tensor, ...]
    hidden: torch.Tensor
    logprobs: torch.Tensor


def target_states(
    config: Config, weights: Weights, tokens: Sequence[int], dtype: torch.dtype = torch.float64
) -> TargetStates:
    """Forward of a Llama, Qwen2 or hybrid target over `tokens`, computed in `dtype`."""
    layers = Layers(config, weights, dtype)
    rows = layers.tensor("model.embed_tokens.weight")[torch.tensor(tokens)]
    entering = [rows]
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}"
        rows = layers.decoder(prefix, rows, layers.norm(f"{prefix}.input_layernorm", rows))
        entering.append(rows)
    hidden = layers.norm("model.norm", rows)
    return TargetStates(tuple(entering), hidden, wide(layers.linear("lm_head", hidden)).log_softmax(-1))


def greedy(config: Config, weights: Weights, prompt: Sequence[int], n: int) -> tuple[int, ...]:
    """The n greedy tokens of a target after `prompt`."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(target_states(config, weights, tokens).logprobs[-1].argmax()))
    return tuple(tokens[len(prompt) :])
