"""The n most probable tokens of each row and their log probabilities.

logits [N, Q, V] of any float type, raw; num_top >= 0. Returns token_ids [N, Q, num_top] int64 and logprobs
[N, Q, num_top] float32 (float64 for float64 logits) in nats, from the most probable down, equals by ascending id. Past
the end of a smaller vocabulary the id is -1 and the logprob -inf. NaN logits count as -inf. Outer dims may be strided.

Ids are exact; logprobs agree with the reference to one float32 ulp (a float64 sum in tiles).

Semantics: top_logprobs of the OpenAI API; each pass over the row finds the best token after the one before, so a few
passes do where n is small, and no row is sorted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.base import FLOATS, VOCAB_WARPS, Backend, Kernel, Variant, expect, expect_inner_contiguous, vocab_block
from kernels.logits import largest, log_total, logprobs_of, real_of, relative, result_dtype, tile
from kernels.mass import NO_ID

PLACEHOLDER = tl.constexpr(-1)


@triton.jit
def _next_best(logits_ptr, value, token, vocab, BLOCK: tl.constexpr):
    """The best (logit, id) that comes after (value, token): smaller, or equal with a higher id."""
    best = value * 0 - float("inf")
    winner = NO_ID
    for start in range(0, vocab, BLOCK):
        ids, logits = tile(logits_ptr, start, vocab, BLOCK)
        after = (ids < vocab) & ((logits < value) | ((logits == value) & (ids > token)))
        top = tl.max(tl.where(after, logits, float("-inf")), 0)
        first = tl.min(tl.where(after & (logits == top), ids, NO_ID), 0)
        better = (top > best) | (winner == NO_ID)
        winner = tl.where(better, first, winner)
        best = tl.where(better, top, best)
    return best, winner


@triton.jit(do_not_specialize=["num_top"])
def _topn_gather(
    logits_ptr,
    ids_ptr,
    logprobs_ptr,
    logits_row_stride,
    logits_stride,
    ids_row_stride,
    ids_stride,
    logprobs_row_stride,
    logprobs_stride,
    num_top,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1).to(tl.int64)
    logits_ptr += row * logits_row_stride + place * logits_stride
    ids_ptr += row * ids_row_stride + place * ids_stride
    logprobs_ptr += row * logprobs_row_stride + place * logprobs_stride
    best = largest(logits_ptr, vocab, BLOCK)
    total = log_total(logits_ptr, best, vocab, BLOCK)
    value = best
    token = -1
    for index in range(num_top):
        logprob = best * 0
        if index < vocab:
            value, token = _next_best(logits_ptr, value, token, vocab, BLOCK)
            logprob = relative(value, best)
        exists = index < vocab
        logprob = tl.where(exists & (logprob > float("-inf")), logprob - total, float("-inf"))
        tl.store(ids_ptr + index, tl.where(exists, token, PLACEHOLDER).to(tl.int64))
        tl.store(logprobs_ptr + index, logprob.to(logprobs_ptr.dtype.element_ty))


def reference(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = real_of(logits)
    missing = max(0, num_top - logits.shape[2])
    ids = values.sort(dim=-1, descending=True, stable=True).indices[..., :num_top]
    logprobs = logprobs_of(values).gather(-1, ids).to(result_dtype(logits))
    return F.pad(ids, (0, missing), value=-1), F.pad(logprobs, (0, missing), value=float("-inf"))


def launch(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, places, vocab = logits.shape
    ids = torch.empty(rows, places, num_top, dtype=torch.long, device=logits.device)
    logprobs = torch.empty(rows, places, num_top, dtype=result_dtype(logits), device=logits.device)
    if ids.numel():
        _topn_gather[(rows, places)](
            logits,
            ids,
            logprobs,
            *logits.stride()[:2],
            *ids.stride()[:2],
            *logprobs.stride()[:2],
            num_top,
            vocab,
            BLOCK=vocab_block(vocab),
            num_warps=VOCAB_WARPS,
        )
    return ids, logprobs


def topn_gather(logits: torch.Tensor, num_top: int, *, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module. Raises ValueError naming the argument that does not fit."""
    expect("logits", logits, (None, None, None), *FLOATS)
    if logits.shape[2] == 0:
        raise ValueError(f"logits.shape={list(logits.shape)}: the vocabulary must not be empty")
    if num_top < 0:
        raise ValueError(f"num_top={num_top}: must be 0 (none) or positive")
    if backend == "torch":
        return reference(logits, num_top)
    expect_inner_contiguous("logits", logits)
    return launch(logits, num_top)


KERNEL = Kernel(
    name="topn_gather",
    shapes="logits [N, Q, V] -> token_ids [N, Q, num_top], logprobs [N, Q, num_top]",
    call=topn_gather,
    reference=reference,
    variants=(
        Variant(
            function=_topn_gather,
            signature={
                "logits_ptr": "*fp32",
                "ids_ptr": "*i64",
                "logprobs_ptr": "*fp32",
                "logits_row_stride": "i64",
                "logits_stride": "i64",
                "ids_row_stride": "i64",
                "ids_stride": "i64",
                "logprobs_row_stride": "i64",
                "logprobs_stride": "i64",
                "num_top": "i32",
                "vocab": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 1024},
            num_warps=VOCAB_WARPS,
        ),
    ),
    properties=(
        "equals reference (logprobs to one ulp)",
        "ties to the lower id",
        "more than the vocabulary",
        "NaN, inf and -inf",
        "tile edges",
        "strided rows",
        "int64 offsets",
        "empty batch",
    ),
)
