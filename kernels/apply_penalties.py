"""Repetition, frequency and presence penalties on raw logits.

logits [N, Q, V] of any float type: Q rows for each of N requests. prompt_counts and output_counts [N, Q, V], of any
integer or float type: how often each token occurs in the prompt, and in the output before the row (drafts on the way to
it included); the same counts for all rows of a request may be an expanded view. repetition, frequency and presence
[N] float32, each None where no request uses it. Returns [N, Q, V] float32, float64 for float64 logits.

In this order: where a token was seen in prompt or output, a positive logit is divided by `repetition` and any other is
multiplied by it (CTRL, Keskar et al. 2019); then frequency * (output count) and presence * (1 where the output has the
token) are taken off (OpenAI's definitions). Off are 1, 0 and 0. Computed in float64 and rounded once. NaN stays NaN.
Outer dims may be strided.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import (
    FLOATS,
    Backend,
    Kernel,
    Variant,
    expect,
    expect_inner_contiguous,
    expect_together,
    vocab_block,
)
from kernels.logits import column, result_dtype
from kernels.mass import upcast

COUNTS = (torch.long, torch.int32, torch.float32, torch.float64)


@triton.jit
def _apply_penalties(
    logits_ptr,
    prompt_ptr,
    output_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    result_ptr,
    logits_row_stride,
    logits_stride,
    prompt_row_stride,
    prompt_stride,
    output_row_stride,
    output_stride,
    result_row_stride,
    result_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    logits_ptr += row * logits_row_stride + query * logits_stride
    prompt_ptr += row * prompt_row_stride + query * prompt_stride
    output_ptr += row * output_row_stride + query * output_stride
    result_ptr += row * result_row_stride + query * result_stride
    logits = upcast(tl.load(logits_ptr + ids, mask=inside, other=0.0))
    in_prompt = tl.load(prompt_ptr + ids, mask=inside, other=0).to(tl.float64)
    in_output = tl.load(output_ptr + ids, mask=inside, other=0).to(tl.float64)
    repetition = tl.load(repetition_ptr + row).to(tl.float64)
    scaled = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits = tl.where(in_prompt + in_output > 0, scaled, logits)
    logits -= tl.load(frequency_ptr + row).to(tl.float64) * in_output
    logits -= tl.load(presence_ptr + row).to(tl.float64) * tl.where(in_output > 0, 1.0, 0.0)
    tl.store(result_ptr + ids, logits.to(result_ptr.dtype.element_ty), mask=inside)


def reference(
    logits: torch.Tensor,
    prompt_counts: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    factor, per_output, once = (column.double()[:, None, None] for column in (repetition, frequency, presence))
    values, in_output = logits.double(), output_counts.double()
    scaled = torch.where(values > 0, values / factor, values * factor)
    values = torch.where(prompt_counts.double() + in_output > 0, scaled, values)
    return (values - per_output * in_output - once * (in_output > 0)).to(result_dtype(logits))


def launch(
    logits: torch.Tensor,
    prompt_counts: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    rows, queries, vocab = logits.shape
    result = torch.empty(rows, queries, vocab, dtype=result_dtype(logits), device=logits.device)
    block = vocab_block(vocab)
    if result.numel():
        _apply_penalties[(rows, queries, triton.cdiv(vocab, block))](
            logits,
            prompt_counts,
            output_counts,
            repetition,
            frequency,
            presence,
            result,
            *logits.stride()[:2],
            *prompt_counts.stride()[:2],
            *output_counts.stride()[:2],
            *result.stride()[:2],
            vocab,
            BLOCK=block,
        )
    return result


def apply_penalties(
    logits: torch.Tensor,
    prompt_counts: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor | None,
    frequency: torch.Tensor | None,
    presence: torch.Tensor | None,
    *,
    backend: Backend,
) -> torch.Tensor:
    """See the module. Raises ValueError naming the tensor that does not fit."""
    expect("logits", logits, (None, None, None), *FLOATS)
    shape = tuple(logits.shape)
    expect("prompt_counts", prompt_counts, shape, *COUNTS)
    expect("output_counts", output_counts, shape, *COUNTS)
    columns = {
        "repetition": column(repetition, 1.0, logits),
        "frequency": column(frequency, 0.0, logits),
        "presence": column(presence, 0.0, logits),
    }
    for name, values in columns.items():
        expect(name, values, shape[:1], torch.float32)
    wide = {"logits": logits, "prompt_counts": prompt_counts, "output_counts": output_counts}
    expect_together(**wide, **columns)
    if backend == "torch":
        return reference(*wide.values(), *columns.values())
    for name, tensor in {**wide, **columns}.items():
        expect_inner_contiguous(name, tensor)
    return launch(*wide.values(), *columns.values())


KERNEL = Kernel(
    name="apply_penalties",
    shapes="logits [N, Q, V], prompt_counts [N, Q, V], output_counts [N, Q, V], repetition, frequency, presence [N] or "
    "None -> [N, Q, V]",
    call=apply_penalties,
    reference=reference,
    variants=(
        Variant(
            function=_apply_penalties,
            signature={
                "logits_ptr": "*fp32",
                "prompt_ptr": "*fp32",
                "output_ptr": "*fp32",
                "repetition_ptr": "*fp32",
                "frequency_ptr": "*fp32",
                "presence_ptr": "*fp32",
                "result_ptr": "*fp32",
                "logits_row_stride": "i64",
                "logits_stride": "i64",
                "prompt_row_stride": "i64",
                "prompt_stride": "i64",
                "output_row_stride": "i64",
                "output_stride": "i64",
                "result_row_stride": "i64",
                "result_stride": "i64",
                "vocab": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 1024},
        ),
    ),
    properties=(
        "equals reference",
        "each penalty alone and all together",
        "NaN and inf",
        "expanded counts",
        "tile edges",
        "strided rows",
        "int64 offsets",
        "empty batch",
    ),
)
