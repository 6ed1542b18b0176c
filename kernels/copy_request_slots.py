"""Ranges into the request-to-slot table: newly allocated slots are entered in their requests' rows, in place.

request_slots [R, W] int64 (rows may be strided), written; request_rows, starts, ends [N] int64: request i gets entries
starts[i] .. ends[i] - 1; slots [S] int64: those of all requests packed in order, at least as many as the ranges hold.
Entries past the table's width are dropped, their slots skipped. Distinct requests have distinct rows. Returns
request_slots. Semantics: SGLang's assign_req_to_token_pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together


@triton.jit
def _copy_request_slots(
    table_ptr,
    request_rows_ptr,
    starts_ptr,
    lens_ptr,
    cu_lens_ptr,
    slots_ptr,
    table_stride,
    table_width,
    num_slots,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_ptr + request)
    length = tl.load(lens_ptr + request)
    first = tl.load(cu_lens_ptr + request) - length
    table_ptr += tl.load(request_rows_ptr + request) * table_stride + start
    for base in range(0, length, BLOCK):
        column = base + tl.arange(0, BLOCK)
        inside = (column < length) & (first + column < num_slots) & (start + column < table_width)
        slot = tl.load(slots_ptr + first + column, mask=inside, other=-1)
        tl.store(table_ptr + column, slot, mask=inside)


def reference(
    request_slots: torch.Tensor,
    request_rows: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    lens = (ends - starts).clamp(min=0)
    first = lens.cumsum(0) - lens
    index = torch.arange(len(slots), device=slots.device)
    owner = torch.bucketize(index, lens.cumsum(0), right=True)
    used = owner < len(lens)
    owner, index = owner[used], index[used]
    column = starts[owner] + index - first[owner]
    fits = column < request_slots.shape[1]
    request_slots[request_rows[owner[fits]], column[fits]] = slots[index[fits]]
    return request_slots


def launch(
    request_slots: torch.Tensor,
    request_rows: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    if len(request_rows):
        lens = (ends - starts).clamp(min=0)
        _copy_request_slots[(len(request_rows),)](
            request_slots,
            request_rows,
            starts,
            lens,
            lens.cumsum(0),
            slots,
            request_slots.stride(0),
            request_slots.shape[1],
            len(slots),
            BLOCK=256,
        )
    return request_slots


def copy_request_slots(
    request_slots: torch.Tensor,
    request_rows: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: Backend,
) -> torch.Tensor:
    """See the module. Raises ValueError naming the tensor that does not fit."""
    requests = len(request_rows)
    expect("request_slots", request_slots, (None, None), torch.long)
    expect("request_rows", request_rows, (requests,), torch.long)
    expect("starts", starts, (requests,), torch.long)
    expect("ends", ends, (requests,), torch.long)
    expect("slots", slots, (None,), torch.long)
    if backend == "torch":
        return reference(request_slots, request_rows, starts, ends, slots)
    tensors = {
        "request_slots": request_slots,
        "request_rows": request_rows,
        "starts": starts,
        "ends": ends,
        "slots": slots,
    }
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(request_slots, request_rows, starts, ends, slots)


KERNEL = Kernel(
    name="copy_request_slots",
    shapes="request_slots [R, W], request_rows [N], starts [N], ends [N], slots [S] -> request_slots, in place",
    call=copy_request_slots,
    reference=reference,
    variants=(
        Variant(
            function=_copy_request_slots,
            signature={
                "table_ptr": "*i64",
                "request_rows_ptr": "*i64",
                "starts_ptr": "*i64",
                "lens_ptr": "*i64",
                "cu_lens_ptr": "*i64",
                "slots_ptr": "*i64",
                "table_stride": "i64",
                "table_width": "i32",
                "num_slots": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 256},
        ),
    ),
    properties=("equals reference", "ragged", "empty ranges", "table end", "nothing else written", "int64 offsets"),
)
