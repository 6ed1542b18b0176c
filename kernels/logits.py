"""Rows of logits as log probabilities and filters read them.

NaN counts as -inf. A row is taken relative to its largest logit, so nothing overflows; where that is +inf, it and its
equals share the whole law. Computed in float64, on tiles over the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.mass import upcast, zero


@triton.jit
def real(x):
    x = upcast(x)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def tile(logits_ptr, start, vocab, BLOCK: tl.constexpr):
    """Ids and their logits, -inf past the vocabulary."""
    ids = start + tl.arange(0, BLOCK)
    return ids, real(tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf")))


@triton.jit
def largest(logits_ptr, vocab, BLOCK: tl.constexpr):
    best = zero() - float("inf")
    for start in range(0, vocab, BLOCK):
        _, logits = tile(logits_ptr, start, vocab, BLOCK)
        best = tl.maximum(best, tl.max(logits, 0))
    return best


@triton.jit
def relative(logits, best):
    """logits - best, <= 0; -inf where a logit is."""
    is_best = logits == best
    below = tl.where(is_best, 0.0, logits) - tl.where(is_best, 0.0, best)
    return tl.where(logits == float("-inf"), logits, below)


@triton.jit
def log_total(logits_ptr, best, vocab, BLOCK: tl.constexpr):
    """log of the sum of exp(logit - best); 0 for a row without a logit above -inf."""
    total = zero()
    for start in range(0, vocab, BLOCK):
        _, logits = tile(logits_ptr, start, vocab, BLOCK)
        total += tl.sum(tl.exp(relative(logits, best)), 0)
    return tl.log(tl.where(total > 0, total, 1.0))


def real_of(logits: torch.Tensor) -> torch.Tensor:
    """float64, NaN as -inf."""
    values = logits.double()
    return values.masked_fill(values.isnan(), float("-inf"))


def relative_of(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """What `relative` does."""
    below = torch.where(logits == best, 0.0, logits - best)
    return torch.where(logits.isneginf(), logits, below)


def logprobs_of(logits: torch.Tensor) -> torch.Tensor:
    """Log probabilities (nats) of real logits [..., V], float64; -inf where a logit is."""
    below = relative_of(logits, logits.amax(-1, keepdim=True))
    total = below.exp().sum(-1, keepdim=True).log()
    return torch.where(below.isneginf(), below, below - total)


def result_dtype(logits: torch.Tensor) -> torch.dtype:
    """Of logits that were processed: float32, but float64 stays."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def column(values: torch.Tensor | None, off: float, logits: torch.Tensor) -> torch.Tensor:
    """A parameter of each request [N]; where no request uses it, the value that is off."""
    if values is not None:
        return values
    dtype = torch.long if isinstance(off, int) else torch.float32
    return torch.full((len(logits),), off, dtype=dtype, device=logits.device)
