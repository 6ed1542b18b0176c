"""Rejection sampling of chains: draft j stays while u_j * q_j(d_j) < p_j(d_j); the first rejected position is drawn
again from the normalised max(p - q, 0), and after k accepted drafts the bonus token is drawn from p_k.

draft_tokens [N, k] int64: -1, or an id outside the vocabulary, = no draft: the chain ends there and its token is drawn
from p. draft_probs [N, k, V] of any float type, or None for drafts that were chosen without chance (q one-hot).
target_probs [N, k + 1, V] of any float type. accept_uniform [N, k] and final_uniform [N, k + 1], float32 or float64 in
[0, 1), the latter indexed by the position of the token that it decides. Returns emitted [N, k + 1] int64, -1 after the
accept length, and accept_lens [N] int64 in 1..k + 1. All but the last dims may be strided. Masses are summed in
float64; what counts as a mass, and what an empty residual falls back to, is told in `mass`.

Semantics: Leviathan et al. 2023 and Chen et al. 2023; random numbers are arguments, as in SGLang's chain sampling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.base import VOCAB_WARPS, Backend, Kernel, vocab_block
from kernels.chain import SHAPES, Block, block_of, chain_variants, check_chain, strides
from kernels.mass import draw, draw_residual, mass, mass_of, upcast

PLACEHOLDER = tl.constexpr(-1)


@triton.jit(do_not_specialize=["num_drafts"])
def _verify_chain_sampled(
    draft_ptr,
    q_ptr,
    p_ptr,
    accept_ptr,
    final_ptr,
    emitted_ptr,
    accept_lens_ptr,
    draft_stride,
    q_row_stride,
    q_stride,
    p_row_stride,
    p_stride,
    accept_stride,
    final_stride,
    emitted_stride,
    num_drafts,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    draft_ptr += row * draft_stride
    p_ptr += row * p_row_stride
    accept_ptr += row * accept_stride
    emitted_ptr += row * emitted_stride
    if q_ptr is not None:
        q_ptr += row * q_row_stride
    accepted = row * 0
    rejected = row * 0 - 1
    going = True
    for position in range(num_drafts):
        draft = tl.load(draft_ptr + position)
        drafted = (draft >= 0) & (draft < vocab)
        p = mass(tl.load(p_ptr + accepted * p_stride + draft, mask=drafted & going, other=0.0))
        # With q one-hot the rule reads u < p.
        scaled = upcast(tl.load(accept_ptr + position))
        if q_ptr is not None:
            scaled *= mass(tl.load(q_ptr + accepted * q_stride + draft, mask=drafted & going, other=0.0))
        kept = going & drafted & (scaled < p)
        rejected = tl.where(going & drafted & ~kept, draft, rejected)
        going = kept
        accepted += kept.to(tl.int64)
    uniform = upcast(tl.load(final_ptr + row * final_stride + accepted))
    if q_ptr is not None:
        q_ptr += accepted * q_stride
    final = draw(p_ptr + accepted * p_stride, q_ptr, 1.0, rejected, uniform, vocab, BLOCK)
    for position in range(num_drafts + 1):
        draft = tl.load(draft_ptr + position, mask=position < accepted, other=PLACEHOLDER)
        tl.store(emitted_ptr + position, tl.where(position == accepted, final, draft))
    tl.store(accept_lens_ptr + row, accepted + 1)


def reference(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    accept_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
) -> Block:
    rows, num_drafts = draft_tokens.shape
    drafted = (draft_tokens >= 0) & (draft_tokens < target_probs.shape[2])
    index = torch.where(drafted, draft_tokens, 0)[:, :, None]
    p = mass_of(target_probs[:, :num_drafts].gather(2, index))[:, :, 0]
    scaled = accept_uniform.double()
    if draft_probs is not None:
        scaled = scaled * mass_of(draft_probs.gather(2, index))[:, :, 0]
    accepted = (drafted & (scaled < p)).long().cumprod(dim=1).sum(dim=1)
    row = torch.arange(rows, device=accepted.device)
    tokens = F.pad(torch.where(drafted, draft_tokens, -1), (0, 1), value=-1)
    rejected = tokens[row, accepted]
    q = None
    if draft_probs is not None and num_drafts:
        q = mass_of(draft_probs[row, accepted.clamp(max=num_drafts - 1)]) * (rejected >= 0)[:, None]
    whole = torch.ones(rows, dtype=torch.double, device=accepted.device)
    final = draw_residual(mass_of(target_probs[row, accepted]), q, whole, rejected, final_uniform[row, accepted])
    return block_of(tokens, accepted, final), accepted + 1


def launch(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    accept_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
) -> Block:
    rows, num_drafts = draft_tokens.shape
    vocab = target_probs.shape[2]
    emitted = torch.empty(rows, num_drafts + 1, dtype=torch.long, device=draft_tokens.device)
    accept_lens = torch.empty(rows, dtype=torch.long, device=draft_tokens.device)
    if rows:
        _verify_chain_sampled[(rows,)](
            draft_tokens,
            draft_probs,
            target_probs,
            accept_uniform,
            final_uniform,
            emitted,
            accept_lens,
            *strides(draft_tokens, draft_probs, target_probs, accept_uniform, final_uniform, emitted),
            num_drafts,
            vocab,
            BLOCK=vocab_block(vocab),
            num_warps=VOCAB_WARPS,
        )
    return emitted, accept_lens


def verify_chain_sampled(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    accept_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
    *,
    backend: Backend,
) -> Block:
    """See the module. Raises ValueError naming the tensor that does not fit."""
    check_chain(draft_tokens, draft_probs, target_probs, accept_uniform, final_uniform, backend)
    run = reference if backend == "torch" else launch
    return run(draft_tokens, draft_probs, target_probs, accept_uniform, final_uniform)


KERNEL = Kernel(
    name="verify_chain_sampled",
    shapes=SHAPES,
    call=verify_chain_sampled,
    reference=reference,
    variants=chain_variants(_verify_chain_sampled, BLOCK=1024),
    properties=(
        "equals reference",
        "exact law",
        "no draft",
        "ids outside the vocabulary",
        "NaN, inf, zero and p == q rows",
        "tile edges",
        "strided rows",
        "int64 offsets",
        "empty batch",
    ),
)
