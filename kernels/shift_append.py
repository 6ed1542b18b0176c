"""Draft inputs: each request's ids move left by one, and the token that was sampled last comes after them.

token_ids [N, Q] int64 (rows may be strided); num_rows [N] int64 in 0..Q: how many of a row count;
next_token_ids [N] int64. Returns [N, Q] int64: ids 1..num_rows - 1, then the next token, then `pad_token_id`; a row of
which nothing counts is all padding. Semantics: feature drafters pair the target's row p with the token at p + 1 (EAGLE,
Li et al. 2024); as in SGLang's rotate_input_ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together


@triton.jit
def _shift_append(
    token_ids_ptr,
    num_rows_ptr,
    next_ptr,
    out_ptr,
    token_ids_stride,
    out_stride,
    num_columns,
    pad_token_id,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(num_rows_ptr + row) - 1
    token = tl.load(token_ids_ptr + row * token_ids_stride + column + 1, mask=column < last, other=-1)
    following = tl.load(next_ptr + row)
    token = tl.where(column < last, token, tl.where(column == last, following, pad_token_id))
    tl.store(out_ptr + row * out_stride + column, token, mask=column < num_columns)


def reference(
    token_ids: torch.Tensor, num_rows: torch.Tensor, next_token_ids: torch.Tensor, pad_token_id: int
) -> torch.Tensor:
    column = torch.arange(token_ids.shape[1], device=token_ids.device)
    last = num_rows[:, None] - 1
    shifted = torch.where(column == last, next_token_ids[:, None], token_ids.roll(-1, dims=1))
    return shifted.masked_fill(column > last, pad_token_id)


def launch(
    token_ids: torch.Tensor, num_rows: torch.Tensor, next_token_ids: torch.Tensor, pad_token_id: int
) -> torch.Tensor:
    rows, columns = token_ids.shape
    out = torch.empty(rows, columns, dtype=torch.long, device=token_ids.device)
    block = 128
    if out.numel():
        _shift_append[(rows, triton.cdiv(columns, block))](
            token_ids,
            num_rows,
            next_token_ids,
            out,
            token_ids.stride(0),
            out.stride(0),
            columns,
            pad_token_id,
            BLOCK=block,
        )
    return out


def shift_append(
    token_ids: torch.Tensor,
    num_rows: torch.Tensor,
    next_token_ids: torch.Tensor,
    *,
    pad_token_id: int = 0,
    backend: Backend,
) -> torch.Tensor:
    """See the module. Raises ValueError naming the tensor that does not fit."""
    rows = len(token_ids)
    expect("token_ids", token_ids, (rows, None), torch.long)
    expect("num_rows", num_rows, (rows,), torch.long)
    expect("next_token_ids", next_token_ids, (rows,), torch.long)
    if backend == "torch":
        return reference(token_ids, num_rows, next_token_ids, pad_token_id)
    tensors = {"token_ids": token_ids, "num_rows": num_rows, "next_token_ids": next_token_ids}
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(token_ids, num_rows, next_token_ids, pad_token_id)


KERNEL = Kernel(
    name="shift_append",
    shapes="token_ids [N, Q], num_rows [N], next_token_ids [N] -> token_ids [N, Q]",
    call=shift_append,
    reference=reference,
    variants=(
        Variant(
            function=_shift_append,
            signature={
                "token_ids_ptr": "*i64",
                "num_rows_ptr": "*i64",
                "next_ptr": "*i64",
                "out_ptr": "*i64",
                "token_ids_stride": "i64",
                "out_stride": "i64",
                "num_columns": "i32",
                "pad_token_id": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 128},
        ),
    ),
    properties=("equals reference", "ragged", "empty rows", "tile edges", "strided rows", "empty batch"),
)
