"""Recovered tokens: for every draft, the token to emit should it be the first to be rejected.

draft_tokens [N, k] int64: -1, or an id outside the vocabulary, = no draft: the token is drawn from p. draft_probs
[N, k, V] of any float type, or None (q one-hot). target_probs [N, k, V] of any float type. noise [N, V], any float
type: numbers of the standard exponential law, one set for each request. Returns recovered [N, k] int64, ids in [0, V).

The token is the argmax over the vocabulary of max(p - q, 0) / noise, of equals the lowest: an exponential race, which
draws from the normalised residual (the smallest of exponential times with rates r is that of i with probability
r_i / sum r). The draft itself is out of the race. An empty residual falls back to p without the draft, and that, if it
is empty too, to the lowest id that is not the draft. What is no probability counts as 0; an id whose noise is not a
positive finite number is out of the race. Computed in float64. All but the last dims may be strided.

Semantics: vLLM's sample_recovered_tokens_kernel, whose last tile may not reach past the vocabulary.
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
from kernels.mass import NO_ID, lanes, mass, mass_of, zero


@triton.jit
def _ahead(times, ids, best, winner):
    """The best of a tile where it beats the best so far; ids ascend, so equals change nothing."""
    top = tl.max(times, 0)
    first = tl.min(tl.where(times == top, ids, NO_ID), 0)
    return tl.maximum(best, top), tl.where(top > best, first, winner)


@triton.jit
def _sample_recovered(
    draft_ptr,
    q_ptr,
    p_ptr,
    noise_ptr,
    recovered_ptr,
    draft_stride,
    q_row_stride,
    q_stride,
    p_row_stride,
    p_stride,
    noise_stride,
    recovered_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1).to(tl.int64)
    draft = tl.load(draft_ptr + row * draft_stride + position)
    draft = tl.where((draft >= 0) & (draft < vocab), draft, -1)
    p_ptr += row * p_row_stride + position * p_stride
    noise_ptr += row * noise_stride
    if q_ptr is not None:
        q_ptr += row * q_row_stride + position * q_stride
    best = zero()
    best_rest = zero()
    winner = -1
    winner_rest = -1
    for start in range(0, vocab, BLOCK):
        ids, residual, rest = lanes(p_ptr, q_ptr, 1.0, draft, start, vocab, BLOCK)
        noise = mass(tl.load(noise_ptr + ids, mask=ids < vocab, other=0.0))
        rate = tl.where(noise > 0, noise, 1.0)
        best, winner = _ahead(tl.where(noise > 0, residual / rate, 0.0), ids, best, winner)
        best_rest, winner_rest = _ahead(tl.where(noise > 0, rest / rate, 0.0), ids, best_rest, winner_rest)
    winner = tl.where(winner < 0, winner_rest, winner)
    lowest = tl.minimum((draft == 0).to(tl.int32), vocab - 1)
    winner = tl.where(winner < 0, lowest, winner)
    tl.store(recovered_ptr + row * recovered_stride + position, winner.to(tl.int64))


def reference(
    draft_tokens: torch.Tensor, draft_probs: torch.Tensor | None, target_probs: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    vocab = target_probs.shape[2]
    ids = torch.arange(vocab, device=draft_tokens.device)
    draft = torch.where((draft_tokens >= 0) & (draft_tokens < vocab), draft_tokens, -1)
    others = ids != draft[:, :, None]
    rest = mass_of(target_probs) * others
    residual = rest
    if draft_probs is not None:
        residual = (rest - mass_of(draft_probs) * (draft >= 0)[:, :, None]).clamp(min=0.0)
    times = mass_of(noise)[:, None]
    runs = times > 0
    times = torch.where(runs, times, 1.0)
    scores = torch.where(runs, residual / times, 0.0)
    scores_rest = torch.where(runs, rest / times, 0.0)
    scores = torch.where((scores > 0).any(-1, keepdim=True), scores, scores_rest)
    scores = torch.where((scores > 0).any(-1, keepdim=True), scores, others.double())
    return torch.where(scores == scores.amax(-1, keepdim=True), ids, vocab).amin(-1)


def launch(
    draft_tokens: torch.Tensor, draft_probs: torch.Tensor | None, target_probs: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    rows, num_drafts, vocab = target_probs.shape
    recovered = torch.empty(rows, num_drafts, dtype=torch.long, device=draft_tokens.device)
    if rows and num_drafts:
        _sample_recovered[(rows, num_drafts)](
            draft_tokens,
            draft_probs,
            target_probs,
            noise,
            recovered,
            draft_tokens.stride(0),
            *((0, 0) if draft_probs is None else draft_probs.stride()[:2]),
            *target_probs.stride()[:2],
            noise.stride(0),
            recovered.stride(0),
            vocab,
            BLOCK=vocab_block(vocab),
            num_warps=VOCAB_WARPS,
        )
    return recovered


def sample_recovered(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    noise: torch.Tensor,
    *,
    backend: Backend,
) -> torch.Tensor:
    """See the module. Raises ValueError naming the tensor that does not fit."""
    expect("draft_tokens", draft_tokens, (None, None), torch.long)
    rows, num_drafts = draft_tokens.shape
    expect("target_probs", target_probs, (rows, num_drafts, None), *FLOATS)
    vocab = target_probs.shape[2]
    if vocab == 0:
        raise ValueError(f"target_probs.shape={list(target_probs.shape)}: the vocabulary must not be empty")
    if draft_probs is not None:
        expect("draft_probs", draft_probs, (rows, num_drafts, vocab), *FLOATS)
    expect("noise", noise, (rows, vocab), *FLOATS)
    tensors = {
        "draft_tokens": draft_tokens,
        "draft_probs": draft_probs,
        "target_probs": target_probs,
        "noise": noise,
    }
    expect_together(**tensors)
    if backend == "torch":
        return reference(draft_tokens, draft_probs, target_probs, noise)
    for name, tensor in tensors.items():
        if tensor is not None:
            expect_inner_contiguous(name, tensor)
    return launch(draft_tokens, draft_probs, target_probs, noise)


_SIGNATURE = {
    "draft_ptr": "*i64",
    "q_ptr": "*fp32",
    "p_ptr": "*fp32",
    "noise_ptr": "*fp32",
    "recovered_ptr": "*i64",
    "draft_stride": "i64",
    "q_row_stride": "i64",
    "q_stride": "i64",
    "p_row_stride": "i64",
    "p_stride": "i64",
    "noise_stride": "i64",
    "recovered_stride": "i64",
    "vocab": "i32",
    "BLOCK": "constexpr",
}

KERNEL = Kernel(
    name="sample_recovered",
    shapes="draft_tokens [N, k], draft_probs [N, k, V] or None, target_probs [N, k, V], noise [N, V] -> "
    "recovered [N, k]",
    call=sample_recovered,
    reference=reference,
    variants=(
        Variant(function=_sample_recovered, signature=_SIGNATURE, constexprs={"BLOCK": 1024}, num_warps=VOCAB_WARPS),
        Variant(
            function=_sample_recovered,
            signature={**_SIGNATURE, "q_ptr": "constexpr"},
            constexprs={"q_ptr": None, "BLOCK": 1024},
            num_warps=VOCAB_WARPS,
        ),
    ),
    properties=(
        "equals reference",
        "exact law",
        "never a rejected id",
        "no draft",
        "ids outside the vocabulary",
        "NaN, inf, zero and p == q rows",
        "noise that is no noise",
        "tile edges",
        "strided rows",
        "int64 offsets",
        "empty batch",
    ),
)
