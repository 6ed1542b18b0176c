"""Building blocks: how hand-set weights make a Llama layer compute something exact.

Every block works on rows whose norm layer gives back the row itself: the squared norm of the row over its width is a
power of 4, and the norm weight undoes it, so nothing is rounded in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from harness.known_answer.base import Config, Weights

RMS_NORM_EPS = 1e-12
"""So small that the norm of an exact row stays exact in float32."""
ROPE_THETA = 10_000.0
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}
HIT = 128.0
"""Gate value of a table entry that fires; one that does not sits at or below -HIT, where SiLU is exactly 0."""
SHARPNESS = 400.0
"""Score of a lag head at its peak, in nats per rotary frequency that it uses: all but the peak underflow in float32."""

Style = Literal["llama", "qwen2", "mimo", "draftproof_hybrid"]
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mimo": "MiMoForCausalLM",
    "draftproof_hybrid": "DraftproofHybridForCausalLM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a checkpoint; `hidden_size` is in elements, heads are `head_dim` wide."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def base_config(
    shape: Shape, eos_token_id: int, dtype: torch.dtype, style: Style = "llama", rope_theta: float = ROPE_THETA
) -> Config:
    """`config.json` of a plain checkpoint."""
    config: Config = {
        "architectures": [ARCHITECTURES[style]],
        "model_type": style,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "torch_dtype": DTYPE_NAMES[dtype],
    }
    if style == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    else:
        config |= {"use_sliding_window": False, "attention_bias": True}
    return config


def attention(prefix: str, shape: Shape, *, bias: bool = False, input_size: int | None = None) -> Weights:
    """Attention projections, all zero, float64: `{prefix}.{q,k,v,o}_proj`. `input_size` defaults to the hidden size."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    width = input_size or shape.hidden_size
    weights = {
        f"{prefix}.q_proj.weight": torch.zeros(q_size, width, dtype=torch.float64),
        f"{prefix}.k_proj.weight": torch.zeros(kv_size, width, dtype=torch.float64),
        f"{prefix}.v_proj.weight": torch.zeros(kv_size, width, dtype=torch.float64),
        f"{prefix}.o_proj.weight": torch.zeros(shape.hidden_size, q_size, dtype=torch.float64),
    }
    if bias:
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            weights[f"{prefix}.{name}_proj.bias"] = torch.zeros(size, dtype=torch.float64)
    return weights


def norm(shape: Shape, squared_norm: float = 2.0) -> torch.Tensor:
    """Norm weight that gives a row of the given squared norm back as it is, float64 [hidden_size]."""
    return torch.full((shape.hidden_size,), math.sqrt(squared_norm / shape.hidden_size), dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Entry:
    """One table entry of an MLP: when every one-hot index in `when` is set, the residual moves by `moves`.

    `moves` are pairs of (row index, amount).
    """

    when: tuple[int, ...]
    moves: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Passage:
    """A linear move: the residual changes by `moves`, each amount times the value at row index `source`."""

    source: int
    moves: tuple[tuple[int, float], ...]


def table_mlp(prefix: str, shape: Shape, entries: Sequence[Entry], anchor: slice, missing: float = 1.0) -> Weights:
    """A SwiGLU MLP that is a lookup table: unit u fires exactly when entry u applies. float64.

    `when[0]` lies in the block `anchor`, which holds exactly one 1. The gate weighs every index of `when` alike and
    subtracts, through the sum over `anchor`, enough that a sum of ones lower by `missing` (or more) gives -HIT: SiLU is
    then exactly 0. The up projection reads `when[0]`. Raises ValueError when the table does not fit.
    """
    gate, up, down = _table(shape, entries, anchor, 2 * HIT / missing, HIT)
    return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up, f"{prefix}.down_proj.weight": down}


def steady_table_mlp(prefix: str, shape: Shape, entries: Sequence[Entry], anchor: slice, missing: float) -> Weights:
    """`table_mlp` for rows that are fed back many times, in two units an entry.

    A single unit makes an error of its row `2 / missing` times larger each time. Here the second unit takes away what
    the first one has beyond HIT, so that an entry that fires moves the row by the same amount whatever the error.
    """
    slope, size = 3 * HIT / missing, len(entries)
    if 2 * size > shape.intermediate_size:
        raise ValueError(f"intermediate_size={shape.intermediate_size}: must be at least {2 * size}, two an entry")
    gate, up, down = _table(shape, entries, anchor, slope, 2 * HIT)
    second = _table(shape, entries, anchor, slope, HIT)
    gate[size : 2 * size], up[size : 2 * size] = second[0][:size], second[1][:size]
    down[:, size : 2 * size] = -second[2][:, :size]
    return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up, f"{prefix}.down_proj.weight": down}


def _table(
    shape: Shape, entries: Sequence[Entry], anchor: slice, slope: float, hit: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate, up and down projections: the gate is `hit` where an entry applies, and lower by `slope` per one missing."""
    if len(entries) > shape.intermediate_size:
        raise ValueError(f"intermediate_size={shape.intermediate_size}: must be at least {len(entries)} table entries")
    gate = torch.zeros(shape.intermediate_size, shape.hidden_size, dtype=torch.float64)
    up, down = torch.zeros_like(gate), torch.zeros_like(gate).T.contiguous()
    widths = torch.tensor([len(entry.when) for entry in entries], dtype=torch.float64)
    gate[: len(entries), anchor] = (hit - slope * widths)[:, None]
    add_at(gate, [(unit, index, slope) for unit, entry in enumerate(entries) for index in entry.when])
    add_at(up, [(unit, entry.when[0], 1.0) for unit, entry in enumerate(entries)])
    add_at(down, [(index, unit, by / HIT) for unit, entry in enumerate(entries) for index, by in entry.moves])
    return gate, up, down


def add_at(matrix: torch.Tensor, terms: Sequence[tuple[int, int, float]]) -> None:
    """Add (row, column, amount) terms in place; terms at the same place add up."""
    if terms:
        rows, columns, amounts = zip(*terms, strict=True)
        values = torch.tensor(amounts, dtype=matrix.dtype)
        matrix.index_put_((torch.tensor(rows), torch.tensor(columns)), values, accumulate=True)


def add_passages(
    weights: Weights, prefix: str, first_unit: int, passages: Sequence[Passage], constant: tuple[int, float]
) -> None:
    """Set the units from `first_unit` on: a gate held open by the `constant` (row index, value) makes a unit linear."""
    index, value = constant
    numbered = list(enumerate(passages, first_unit))
    add_at(weights[f"{prefix}.gate_proj.weight"], [(unit, index, HIT / value) for unit, _ in numbered])
    add_at(weights[f"{prefix}.up_proj.weight"], [(unit, passage.source, 1.0) for unit, passage in numbered])
    moves = [(target, unit, by / HIT) for unit, passage in numbered for target, by in passage.moves]
    add_at(weights[f"{prefix}.down_proj.weight"], moves)


def lag_vectors(
    head_dim: int, distance: int, rope_theta: float = ROPE_THETA, band: tuple[float, float] = (0.0, 1.0)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Constant query and key, float64 [head_dim] each, whose rotary score peaks exactly `distance` positions back.

    Rotate-half layout. Only rotary frequencies inside `band` (radians per position, ends included) are used: each adds
    SHARPNESS * cos(frequency * (n - m - distance)) nats; the factor sqrt(head_dim) undoes the softmax scale. The
    distance sits in the query, so heads of different distance can share their keys.
    """
    half = head_dim // 2
    frequency = rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    used = ((frequency >= band[0]) & (frequency <= band[1])).double()
    angle = frequency * distance
    query = torch.cat([used * angle.cos(), -used * angle.sin()])
    key = SHARPNESS * math.sqrt(head_dim) * torch.cat([used, torch.zeros_like(used)])
    return query, key


@dataclass(frozen=True, slots=True)
class Constant:
    """Columns of an attention input whose sum is always `value`."""

    columns: slice
    value: float = 1.0


def add_own_row_heads(
    weights: Weights,
    prefix: str,
    shape: Shape,
    passages: Sequence[Passage],
    query_constant: Constant,
    key_constant: Constant | None = None,
    *,
    rope_theta: float = ROPE_THETA,
    band: tuple[float, float] = (0.0, 1.0),
) -> None:
    """Set heads that look at nothing but their own row and make `passages` through it, at most one per KV dimension.

    Queries and keys come from the biases where there are any, else from the constants of the row. Every query head
    looks at its own row; the first of each group writes. With biases, exactly one source may be 1 in any row: the first
    value is then 1 minus all other sources.
    """
    query, key = lag_vectors(shape.head_dim, 0, rope_theta, band)
    for name, vector, constant in (("q", query, query_constant), ("k", key, key_constant or query_constant)):
        heads = shape.num_heads if name == "q" else shape.num_kv_heads
        if f"{prefix}.{name}_proj.bias" in weights:
            weights[f"{prefix}.{name}_proj.bias"][:] = vector.repeat(heads)
        else:
            columns = vector.repeat(heads)[:, None] / constant.value
            weights[f"{prefix}.{name}_proj.weight"][:, constant.columns] = columns
    group = shape.num_heads // shape.num_kv_heads
    values = [(value, passage.source, 1.0) for value, passage in enumerate(passages)]
    if f"{prefix}.v_proj.bias" in weights:
        values[0:1] = [(0, passage.source, -1.0) for passage in passages[1:]]
        weights[f"{prefix}.v_proj.bias"][0] = 1.0
    add_at(weights[f"{prefix}.v_proj.weight"], values)
    writes = []
    for value, passage in enumerate(passages):
        head, offset = divmod(value, shape.head_dim)
        writes += [(row, head * group * shape.head_dim + offset, by) for row, by in passage.moves]
    add_at(weights[f"{prefix}.o_proj.weight"], writes)


def stored(weights: Weights, dtype: torch.dtype) -> Weights:
    """The weights as the checkpoint holds them; integer and boolean tensors stay as they are."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
