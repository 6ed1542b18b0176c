"""Rows of probabilities as every sampler reads them, and the draw that ends a block.

A probability that is negative, infinite or NaN counts as 0. A draw takes the first id whose cumulated mass exceeds
`uniform` times the whole (inverse CDF, ids ascending, float64): an id of mass 0 cannot come out. Where a residual is
empty its fallback is drawn from instead: the target's law without the rejected id; where that is empty too, the lowest
id that is not the rejected one (a vocabulary of one id has only that).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NO_ID = tl.constexpr(2**31 - 1)
"""Larger than any token id: the neutral element of a minimum over ids."""


@triton.jit
def upcast(x):
    """float64. By way of float32, which the interpreter needs for bfloat16 and which loses nothing of a half."""
    if x.dtype.primitive_bitwidth < 32:
        x = x.to(tl.float32)
    return x.to(tl.float64)


@triton.jit
def mass(x):
    x = upcast(x)
    return tl.where((x > 0) & (x < float("inf")), x, 0.0)


@triton.jit
def zero():
    return tl.full((), 0.0, tl.float64)


@triton.jit
def lanes(p_ptr, q_ptr, scale, rejected, start, vocab, BLOCK: tl.constexpr):
    """One tile: ids, masses of max(scale * p - q, 0) and of p, both without the rejected id."""
    ids = start + tl.arange(0, BLOCK)
    inside = ids < vocab
    p = tl.where(ids != rejected, mass(tl.load(p_ptr + ids, mask=inside, other=0.0)), 0.0)
    residual = scale * p
    if q_ptr is not None:
        width = tl.where(rejected >= 0, vocab, 0)
        residual -= mass(tl.load(q_ptr + ids, mask=ids < width, other=0.0))
    return ids, tl.maximum(residual, 0.0), p


@triton.jit
def totals(p_ptr, q_ptr, scale, rejected, vocab, BLOCK: tl.constexpr):
    """Whole masses of the residual and of its fallback."""
    residual_total = zero()
    rest_total = zero()
    for start in range(0, vocab, BLOCK):
        _, residual, p = lanes(p_ptr, q_ptr, scale, rejected, start, vocab, BLOCK)
        residual_total += tl.sum(residual, 0)
        rest_total += tl.sum(p, 0)
    return residual_total, rest_total


@triton.jit
def draw(p_ptr, q_ptr, scale, rejected, uniform, vocab, BLOCK: tl.constexpr):
    """An id from max(scale * p - q, 0), by the rules of the module. `q_ptr` None: q is one-hot at the rejected id;
    `rejected` -1: nothing was rejected, and q is not looked at."""
    residual_total, rest_total = totals(p_ptr, q_ptr, scale, rejected, vocab, BLOCK)
    narrowed = residual_total > 0
    threshold = uniform * tl.where(narrowed, residual_total, rest_total)
    before = zero()
    start = 0
    found = NO_ID
    last = -1
    while (start < vocab) & (found == NO_ID):
        ids, residual, p = lanes(p_ptr, q_ptr, scale, rejected, start, vocab, BLOCK)
        masses = tl.where(narrowed, residual, p)
        hit = (before + tl.cumsum(masses, 0) > threshold) & (masses > 0)
        found = tl.min(tl.where(hit, ids, NO_ID), 0)
        last = tl.maximum(last, tl.max(tl.where(masses > 0, ids, -1), 0))
        before += tl.sum(masses, 0)
        start += BLOCK
    lowest = tl.minimum((rejected == 0).to(tl.int32), vocab - 1)
    # Rounding may leave the threshold at the very end of the last mass.
    found = tl.where(found == NO_ID, last, found)
    return tl.where(found < 0, lowest, found)


def mass_of(probs: torch.Tensor) -> torch.Tensor:
    """float64; what is no probability counts as 0."""
    masses = probs.double()
    return torch.where((masses > 0) & (masses < float("inf")), masses, 0.0)


def without(masses: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Masses [N, V] with one id of each row taken out; -1 = none."""
    ids = torch.arange(masses.shape[1], device=masses.device)
    return masses.masked_fill(ids == rejected[:, None], 0.0)


def draw_of(masses: torch.Tensor, allowed: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Masses [N, V] float64, uniform [N] -> ids [N] int64. Rows without mass give the lowest id that is `allowed`
    [N, V], or 0."""
    mass_up_to = masses.cumsum(-1)
    hit = (mass_up_to > uniform.double()[:, None] * mass_up_to[:, -1:]) & (masses > 0)
    ids = torch.arange(masses.shape[1], device=masses.device)
    last = torch.where(masses > 0, ids, -1).amax(-1)
    drawn = torch.where(hit.any(-1), hit.long().argmax(-1), last)
    return torch.where(drawn < 0, allowed.long().argmax(-1), drawn)


def draw_residual(
    p: torch.Tensor, q: torch.Tensor | None, scale: torch.Tensor, rejected: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """What `draw` does, on rows: p, q [N, V] and scale [N] float64, rejected [N], uniform [N] -> ids [N]."""
    rest = without(p, rejected)
    residual = scale[:, None] * rest if q is None else (scale[:, None] * rest - q).clamp(min=0.0)
    masses = torch.where(residual.sum(-1, keepdim=True) > 0, residual, rest)
    ids = torch.arange(p.shape[1], device=p.device)
    return draw_of(masses, ids != rejected[:, None], uniform)
