"""Block verification of chains: the block of drafts is weighed as a whole, which accepts at least as many drafts in
expectation as one by one, and leaves the same law.

With w_0 = 1 and w_i = min(w_{i-1} * p_{i-1}(d_i) / q_{i-1}(d_i), 1), where p_i and q_i are the laws after i drafts, and
R_i = sum over x of max(w_i * p_i(x) - q_i(x), 0): the first i of k drafts pass with probability h_k = w_k for the whole
chain and h_i = R_i / (R_i + 1 - w_i) for a shorter one, each by a coin of its own; the longest that passes is accepted
(none at all always passes). After the whole chain the bonus token is drawn from p_k, else the next one from
max(w_i * p_i - q_i, 0).

Arguments, results and the treatment of bad rows and ids are those of verify_chain_sampled: draft_tokens [N, k] int64,
-1 = no draft, where the chain ends; draft_probs [N, k, V] or None (q one-hot); target_probs [N, k + 1, V];
accept_uniform [N, k] (number i - 1 is the coin of h_i) and final_uniform [N, k + 1] (by the place of the token that it
decides) -> emitted [N, k + 1] int64 with -1 after the accept length, accept_lens [N] int64. A draft with q = 0 where
p > 0 has ratio 1 at least.

Semantics: Sun et al. 2024, Block Verification Accelerates Speculative Decoding; vLLM's rejection_sample_method="block".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.base import VOCAB_WARPS, Backend, Kernel, vocab_block
from kernels.chain import SHAPES, Block, block_of, chain_variants, check_chain, strides
from kernels.mass import draw, draw_residual, mass, mass_of, totals, upcast, without

PLACEHOLDER = tl.constexpr(-1)


@triton.jit
def _weight(weight, p, q):
    """min(weight * p / q, 1); the quotient is never formed where it could overflow."""
    product = weight * p
    return tl.where(product < q, product / tl.where(q > 0, q, 1.0), tl.where(product > 0, 1.0, 0.0))


@triton.jit(do_not_specialize=["num_drafts"])
def _verify_block(
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
    PLACES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    draft_ptr += row * draft_stride
    p_ptr += row * p_row_stride
    accept_ptr += row * accept_stride
    emitted_ptr += row * emitted_stride
    if q_ptr is not None:
        q_ptr += row * q_row_stride
    lane = tl.arange(0, PLACES)
    weight = upcast(tl.full((), 1.0, tl.float32))
    weights = tl.where(lane == 0, weight, 0.0)
    length = row * 0
    going = True
    for position in range(num_drafts):
        draft = tl.load(draft_ptr + position)
        going = going & (draft >= 0) & (draft < vocab)
        p = mass(tl.load(p_ptr + length * p_stride + draft, mask=going, other=0.0))
        q = upcast(tl.full((), 1.0, tl.float32))
        if q_ptr is not None:
            q = mass(tl.load(q_ptr + length * q_stride + draft, mask=going, other=0.0))
        weight = _weight(weight, p, q)
        length += going.to(tl.int64)
        weights = tl.where(going & (lane == length), weight, weights)
    accepted = length
    weight = tl.sum(tl.where(lane == length, weights, 0.0), 0)
    rejected = row * 0 - 1
    passed = (length == 0) | (upcast(tl.load(accept_ptr + length - 1, mask=length > 0, other=0.0)) < weight)
    while ~passed:
        accepted -= 1
        weight = tl.sum(tl.where(lane == accepted, weights, 0.0), 0)
        rejected = tl.load(draft_ptr + accepted)
        passed = accepted == 0
        if ~passed:
            law_ptr = p_ptr + accepted * p_stride
            q_law_ptr = q_ptr
            if q_ptr is not None:
                q_law_ptr = q_ptr + accepted * q_stride
            residual, _ = totals(law_ptr, q_law_ptr, weight, rejected, vocab, BLOCK)
            coin = upcast(tl.load(accept_ptr + accepted - 1))
            passed = coin * (residual + 1.0 - weight) < residual
    uniform = upcast(tl.load(final_ptr + row * final_stride + accepted))
    if q_ptr is not None:
        q_ptr += accepted * q_stride
    weight = tl.where(rejected < 0, 1.0, weight)
    final = draw(p_ptr + accepted * p_stride, q_ptr, weight, rejected, uniform, vocab, BLOCK)
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
    row = torch.arange(rows, device=draft_tokens.device)
    drafted = ((draft_tokens >= 0) & (draft_tokens < target_probs.shape[2])).long().cumprod(dim=1).bool()
    length = drafted.sum(dim=1)
    weight = torch.ones(rows, dtype=torch.double, device=draft_tokens.device)
    weights, accepted = weight.clone(), torch.zeros_like(length)
    for place in range(1, num_drafts + 1):
        token = torch.where(drafted[:, place - 1], draft_tokens[:, place - 1], 0)
        product = weight * mass_of(target_probs[row, place - 1, token])
        q = torch.ones_like(product) if draft_probs is None else mass_of(draft_probs[row, place - 1, token])
        weight = torch.where(product < q, product / torch.where(q > 0, q, 1.0), (product > 0).double())
        coin = accept_uniform[:, place - 1].double()
        passed = coin < weight
        if place < num_drafts:
            residual = _residual(draft_tokens, draft_probs, target_probs, weight, place)
            passed = torch.where(place == length, passed, coin * (residual + 1.0 - weight) < residual)
        passed &= place <= length
        accepted = torch.where(passed, place, accepted)
        weights = torch.where(passed, weight, weights)
    tokens = F.pad(torch.where(drafted, draft_tokens, -1), (0, 1), value=-1)
    rejected = tokens[row, accepted]
    weights = torch.where(rejected < 0, 1.0, weights)
    q_end = None
    if draft_probs is not None and num_drafts:
        q_end = mass_of(draft_probs[row, accepted.clamp(max=num_drafts - 1)]) * (rejected >= 0)[:, None]
    final = draw_residual(mass_of(target_probs[row, accepted]), q_end, weights, rejected, final_uniform[row, accepted])
    return block_of(tokens, accepted, final), accepted + 1


def _residual(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    weight: torch.Tensor,
    place: int,
) -> torch.Tensor:
    """R_i of the module [N], i = place < k; the draft at i has no part in it."""
    left = weight[:, None] * without(mass_of(target_probs[:, place]), draft_tokens[:, place])
    if draft_probs is not None:
        left = (left - mass_of(draft_probs[:, place])).clamp(min=0.0)
    return left.sum(dim=1)


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
        _verify_block[(rows,)](
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
            PLACES=max(2, 1 << num_drafts.bit_length()),
        )
    return emitted, accept_lens


def verify_block(
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
    name="verify_block",
    shapes=SHAPES,
    call=verify_block,
    reference=reference,
    variants=chain_variants(_verify_block, BLOCK=1024, PLACES=16),
    properties=(
        "equals reference",
        "exact law",
        "accepts no fewer than rejection sampling by token",
        "no draft",
        "ids outside the vocabulary",
        "NaN, inf, zero and p == q rows",
        "tile edges",
        "strided rows",
        "int64 offsets",
        "empty batch",
    ),
    spills="a few scalars: the weights of all places are kept while laws are summed",
    spill_limit=8,
)
