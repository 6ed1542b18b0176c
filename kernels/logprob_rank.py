"""Log probability and rank of chosen tokens.

logits [N, Q, V] of any float type, raw; token_ids [N, Q] int64: -1, or an id outside the vocabulary, = an unused place.
Returns logprobs [N, Q] float32 (float64 for float64 logits), in nats, and ranks [N, Q] int64: 1 + the number of tokens
that are strictly more probable. An unused place has logprob -inf and rank 0. NaN logits count as -inf. Rows may be
strided.

Ranks are exact. The sum behind a logprob is one of float64 terms in tiles: logprobs agree with the reference to one
float32 ulp. No size of the batch is an argument of the kernel, and none of its strides is specialised on: one
compilation serves all batches.

Semantics: the strict count that a rank is by definition; vLLM's batched_count_greater_than, which counts ties too.
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
from kernels.logits import largest, logprobs_of, real, real_of, relative, result_dtype, tile
from kernels.mass import zero


@triton.jit(do_not_specialize=["token_stride", "logprobs_stride", "ranks_stride"])
def _logprob_rank(
    logits_ptr,
    token_ptr,
    logprobs_ptr,
    ranks_ptr,
    logits_row_stride,
    logits_stride,
    token_stride,
    logprobs_stride,
    ranks_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1).to(tl.int64)
    logits_ptr += row * logits_row_stride + place * logits_stride
    token = tl.load(token_ptr + row * token_stride + place)
    used = (token >= 0) & (token < vocab)
    chosen = real(tl.load(logits_ptr + token, mask=used, other=float("-inf")))
    best = largest(logits_ptr, vocab, BLOCK)
    total = zero()
    rank = tl.full((), 1, tl.int64)
    for start in range(0, vocab, BLOCK):
        _, logits = tile(logits_ptr, start, vocab, BLOCK)
        total += tl.sum(tl.exp(relative(logits, best)), 0)
        rank += tl.sum((logits > chosen).to(tl.int64), 0)
    logprob = relative(chosen, best)
    logprob = tl.where(logprob == float("-inf"), logprob, logprob - tl.log(tl.where(total > 0, total, 1.0)))
    tl.store(logprobs_ptr + row * logprobs_stride + place, logprob.to(logprobs_ptr.dtype.element_ty))
    tl.store(ranks_ptr + row * ranks_stride + place, tl.where(used, rank, 0))


def reference(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = real_of(logits)
    used = (token_ids >= 0) & (token_ids < logits.shape[2])
    index = torch.where(used, token_ids, 0)[:, :, None]
    logprobs = logprobs_of(values).gather(2, index)[:, :, 0]
    ranks = (values > values.gather(2, index)).sum(2) + 1
    return torch.where(used, logprobs, float("-inf")).to(result_dtype(logits)), torch.where(used, ranks, 0)


def launch(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, places, vocab = logits.shape
    logprobs = torch.empty(rows, places, dtype=result_dtype(logits), device=logits.device)
    ranks = torch.empty(rows, places, dtype=torch.long, device=logits.device)
    if rows and places:
        _logprob_rank[(rows, places)](
            *launch_arguments(logits, token_ids, logprobs, ranks), BLOCK=vocab_block(vocab), num_warps=VOCAB_WARPS
        )
    return logprobs, ranks


def launch_arguments(
    logits: torch.Tensor, token_ids: torch.Tensor, logprobs: torch.Tensor, ranks: torch.Tensor
) -> tuple[torch.Tensor | int, ...]:
    """What a launch is specialised on."""
    strides = (*logits.stride()[:2], token_ids.stride(0), logprobs.stride(0), ranks.stride(0))
    return logits, token_ids, logprobs, ranks, *strides, logits.shape[2]


def logprob_rank(
    logits: torch.Tensor, token_ids: torch.Tensor, *, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module. Raises ValueError naming the tensor that does not fit."""
    expect("logits", logits, (None, None, None), *FLOATS)
    if logits.shape[2] == 0:
        raise ValueError(f"logits.shape={list(logits.shape)}: the vocabulary must not be empty")
    expect("token_ids", token_ids, tuple(logits.shape[:2]), torch.long)
    expect_together(logits=logits, token_ids=token_ids)
    if backend == "torch":
        return reference(logits, token_ids)
    expect_inner_contiguous("logits", logits)
    expect_inner_contiguous("token_ids", token_ids)
    return launch(logits, token_ids)


KERNEL = Kernel(
    name="logprob_rank",
    shapes="logits [N, Q, V], token_ids [N, Q] -> logprobs [N, Q], ranks [N, Q]",
    call=logprob_rank,
    reference=reference,
    variants=(
        Variant(
            function=_logprob_rank,
            signature={
                "logits_ptr": "*fp32",
                "token_ptr": "*i64",
                "logprobs_ptr": "*fp32",
                "ranks_ptr": "*i64",
                "logits_row_stride": "i64",
                "logits_stride": "i64",
                "token_stride": "i64",
                "logprobs_stride": "i64",
                "ranks_stride": "i64",
                "vocab": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 1024},
            num_warps=VOCAB_WARPS,
        ),
    ),
    properties=(
        "equals reference (logprobs to one ulp)",
        "one compilation for batches of 1..64",
        "ties",
        "unused places, ids outside the vocabulary",
        "NaN, inf and -inf",
        "tile edges",
        "strided rows",
        "int64 offsets",
        "empty batch",
    ),
)
