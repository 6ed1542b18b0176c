"""Temperature, top-k, top-p and min-p: logits whose softmax is the law that a request asked for.

logits [N, Q, V] of any float type: Q rows for each of N requests. temperature, top_k, top_p, min_p [N], each None where
no request uses it: temperature, top_p and min_p float32 or float64, top_k int64. Returns [N, Q, V] float32, float64 for
float64 logits: (logit - largest logit) / temperature of the tokens that stay, -inf for the others.

- A temperature of 0 (or none, NaN, negative) is greedy: 0 for the first of the largest logits, nothing else stays.
- top_k keeps the k largest, and ties with the k-th; 0 or less is off.
- top_p keeps the smallest set of most probable tokens whose mass reaches top_p, of what top_k left: a token stays while
  the mass before it is below top_p. Of equally probable tokens lower ids come first. 1 or more, and NaN, is off; the
  most probable token always stays.
- min_p keeps tokens at least min_p times as probable as the most probable one; 0 or less, and NaN, is off.

They act in this order (that of Hugging Face). NaN counts as -inf; a row without a logit above -inf stays all -inf, and
samplers give such a row its lowest id. Masses are float64 sums. Outer dims may be strided.

The kernel sorts nothing: the k-th largest logit, and the least probable one inside top-p, are found bit by bit, with a
pass over the row for each bit of the magnitude of a (never positive) scaled logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import (
    FLOATS,
    VOCAB_WARPS,
    Backend,
    Kernel,
    Variant,
    expect,
    expect_inner_contiguous,
    expect_together,
    vocab_block,
)
from kernels.logits import column, largest, real_of, relative, relative_of, result_dtype, tile
from kernels.mass import upcast, zero

LEAST = 5e-324
"""Smallest positive float64: a mass that only the most probable token comes before."""
_LEAST = tl.constexpr(LEAST)


@triton.jit
def _scaled(logits_ptr, start, best, temperature, vocab, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """One tile: ids, scaled logits, and their magnitudes as integers in the same order."""
    ids, logits = tile(logits_ptr, start, vocab, BLOCK)
    scaled = relative(logits, best)
    present = scaled > float("-inf")
    scaled = tl.where(present, tl.where(present, scaled, 0.0) / temperature, float("-inf"))
    if BITS == 32:
        scaled = scaled.to(tl.float32)
        magnitude = tl.abs(scaled).to(tl.int32, bitcast=True).to(tl.int64)
    else:
        magnitude = tl.abs(scaled).to(tl.int64, bitcast=True)
    return ids, scaled, magnitude


@triton.jit
def _kth(logits_ptr, k, best, temperature, vocab, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Magnitude of the k-th largest: the highest number that fewer than k magnitudes are below."""
    found = k * 0
    for index in range(BITS - 1):
        higher = found | ((k * 0 + 1) << (BITS - 2 - index))
        below = k * 0
        for start in range(0, vocab, BLOCK):
            ids, _, magnitude = _scaled(logits_ptr, start, best, temperature, vocab, BLOCK, BITS)
            below += tl.sum(((magnitude < higher) & (ids < vocab)).to(tl.int64), 0)
        found = tl.where(below < k, higher, found)
    return found


@triton.jit
def _mass_below(logits_ptr, cut, limit, best, temperature, vocab, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Mass of magnitudes below `cut` and up to `limit`, where the largest logit has mass 1."""
    total = zero()
    for start in range(0, vocab, BLOCK):
        _, scaled, magnitude = _scaled(logits_ptr, start, best, temperature, vocab, BLOCK, BITS)
        inside = (magnitude < cut) & (magnitude <= limit)
        total += tl.sum(tl.where(inside, tl.exp(scaled.to(tl.float64)), 0.0), 0)
    return total


@triton.jit
def _nucleus(logits_ptr, top_p, limit, best, temperature, vocab, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """The highest magnitude that a mass below `goal` comes before, that mass, and `goal`: top_p of the whole."""
    found = limit * 0
    before = zero()
    goal = zero()
    # The first pass is for the whole, in the same loop: the code of a pass is long.
    for index in range(BITS):
        whole = index == 0
        higher = tl.where(whole, _most(BITS), found | ((limit * 0 + 1) << (BITS - 1 - index)))
        below = _mass_below(logits_ptr, higher, limit, best, temperature, vocab, BLOCK, BITS)
        goal = tl.where(whole, tl.maximum(top_p * below, _LEAST), goal)
        narrower = (below < goal) & (index > 0)
        found = tl.where(narrower, higher, found)
        before = tl.where(narrower, below, before)
    return found, before, goal


@triton.jit
def _most(BITS: tl.constexpr):
    """Above any magnitude but NaN's."""
    return tl.full((), 2 ** (BITS - 1) - 1, tl.int64)


@triton.jit
def _filter_logits(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    result_ptr,
    logits_row_stride,
    logits_stride,
    result_row_stride,
    result_stride,
    vocab,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1).to(tl.int64)
    logits_ptr += row * logits_row_stride + query * logits_stride
    result_ptr += row * result_row_stride + query * result_stride
    best = largest(logits_ptr, vocab, BLOCK)
    temperature = upcast(tl.load(temperature_ptr + row))
    sampled = temperature > 0
    temperature = tl.where(sampled, temperature, 1.0)
    limit = _most(BITS)
    k = tl.load(top_k_ptr + row)
    if sampled & (k > 0) & (k < vocab):
        limit = _kth(logits_ptr, k, best, temperature, vocab, BLOCK, BITS)
    # A greedy row is one whose nucleus is the first token.
    cut = tl.where(sampled, _most(BITS), 0)
    before = zero()
    goal = tl.where(sampled, zero() + float("inf"), _LEAST)
    top_p = upcast(tl.load(top_p_ptr + row))
    if sampled & (top_p < 1):
        cut, before, goal = _nucleus(logits_ptr, top_p, limit, best, temperature, vocab, BLOCK, BITS)
    min_p = upcast(tl.load(min_p_ptr + row))
    min_p = tl.where(sampled & (min_p > 0), min_p, 0.0)
    ties = before * 0
    for start in range(0, vocab, BLOCK):
        ids, scaled, magnitude = _scaled(logits_ptr, start, best, temperature, vocab, BLOCK, BITS)
        mass = tl.exp(scaled.to(tl.float64))
        tied = tl.where(magnitude == cut, 1.0, zero())
        earlier = ties + tl.cumsum(tied, 0) - tied
        ties += tl.sum(tied, 0)
        kept = (magnitude < cut) | ((magnitude == cut) & (before + earlier * mass < goal))
        kept = kept & (magnitude <= limit) & (mass >= min_p)
        tl.store(result_ptr + ids, tl.where(kept, scaled, float("-inf")), mask=ids < vocab)


def reference(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    heat, k, p, floor = (column[:, None, None] for column in (temperature, top_k, top_p, min_p))
    vocab = logits.shape[2]
    values = real_of(logits)
    sampled = heat > 0
    scaled = relative_of(values, values.amax(-1, keepdim=True))
    heated = scaled / torch.where(sampled, heat.double(), 1.0)
    scaled = torch.where(scaled.isneginf(), scaled, heated).to(result_dtype(logits))
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    k = torch.where((k > 0) & (k < vocab) & sampled, k, vocab).expand(*logits.shape[:2], 1)
    kept = ordered >= ordered.gather(-1, k - 1)
    masses = torch.where(kept, ordered.double().exp(), 0.0)
    upto = masses.cumsum(-1)
    before = torch.cat([torch.zeros_like(upto[..., :1]), upto[..., :-1]], dim=-1)
    p = torch.where(sampled, p.double(), 0.0)
    kept &= ~(p < 1) | (before < (p * upto[..., -1:]).clamp(min=LEAST))
    kept &= (masses >= floor.double()) | ~(floor > 0) | ~sampled
    filtered = ordered.masked_fill(~kept, float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, order, filtered)


def launch(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    rows, queries, vocab = logits.shape
    result = torch.empty(rows, queries, vocab, dtype=result_dtype(logits), device=logits.device)
    if rows and queries:
        _filter_logits[(rows, queries)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            result,
            *logits.stride()[:2],
            *result.stride()[:2],
            vocab,
            BLOCK=vocab_block(vocab),
            num_warps=VOCAB_WARPS,
            BITS=64 if logits.dtype == torch.float64 else 32,
        )
    return result


def filter_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    *,
    backend: Backend,
) -> torch.Tensor:
    """See the module. Raises ValueError naming the tensor that does not fit."""
    expect("logits", logits, (None, None, None), *FLOATS)
    if logits.shape[2] == 0:
        raise ValueError(f"logits.shape={list(logits.shape)}: the vocabulary must not be empty")
    columns = {
        "temperature": column(temperature, 0.0, logits),
        "top_k": column(top_k, 0, logits),
        "top_p": column(top_p, 1.0, logits),
        "min_p": column(min_p, 0.0, logits),
    }
    for name, values in columns.items():
        expect(name, values, (len(logits),), *((torch.long,) if name == "top_k" else (torch.float32, torch.float64)))
    expect_together(logits=logits, **columns)
    if backend == "torch":
        return reference(logits, *columns.values())
    for name, tensor in {"logits": logits, **columns}.items():
        expect_inner_contiguous(name, tensor)
    return launch(logits, *columns.values())


KERNEL = Kernel(
    name="filter_logits",
    shapes="logits [N, Q, V], temperature, top_k, top_p, min_p [N] or None -> [N, Q, V]",
    call=filter_logits,
    reference=reference,
    variants=(
        Variant(
            function=_filter_logits,
            signature={
                "logits_ptr": "*fp32",
                "temperature_ptr": "*fp32",
                "top_k_ptr": "*i64",
                "top_p_ptr": "*fp32",
                "min_p_ptr": "*fp32",
                "result_ptr": "*fp32",
                "logits_row_stride": "i64",
                "logits_stride": "i64",
                "result_row_stride": "i64",
                "result_stride": "i64",
                "vocab": "i32",
                "BLOCK": "constexpr",
                "BITS": "constexpr",
            },
            constexprs={"BLOCK": 1024, "BITS": 32},
            num_warps=VOCAB_WARPS,
        ),
    ),
    properties=(
        "equals reference",
        "each filter alone and all together",
        "ties",
        "greedy rows among others",
        "NaN, inf and -inf",
        "any temperature",
        "tile edges",
        "strided rows",
        "int64 offsets",
        "empty batch",
    ),
)
