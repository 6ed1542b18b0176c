"""Ranges out of the request-to-slot table: the slots that an extend pass writes to, packed.

request_slots [R, W] int64 (rows may be strided); request_rows, starts, ends [N] int64: request i takes table entries
starts[i] .. ends[i] - 1 (cut at the table's width). Returns [num_slots] int64, ranges one after another, then -1;
`num_slots` is the host's bound on the sum of their lengths, and what exceeds it is dropped. Semantics: SGLang's
assign_extend_cache_locs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together


@triton.jit
def _assign_extend_slots(
    table_ptr,
    request_rows_ptr,
    starts_ptr,
    lens_ptr,
    cu_lens_ptr,
    out_ptr,
    table_stride,
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
        slot = tl.load(table_ptr + column, mask=column < length, other=-1)
        tl.store(out_ptr + first + column, slot, mask=(column < length) & (first + column < num_slots))


def _lens(starts: torch.Tensor, ends: torch.Tensor, width: int) -> torch.Tensor:
    return (ends.clamp(max=width) - starts).clamp(min=0)


def reference(
    request_slots: torch.Tensor, request_rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, num_slots: int
) -> torch.Tensor:
    column = torch.arange(request_slots.shape[1], device=starts.device)
    wanted = (column >= starts[:, None]) & (column < ends[:, None])
    packed = request_slots[request_rows][wanted][:num_slots]
    return torch.cat([packed, packed.new_full((num_slots - len(packed),), -1)])


def launch(
    request_slots: torch.Tensor, request_rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, num_slots: int
) -> torch.Tensor:
    out = torch.full((num_slots,), -1, dtype=torch.long, device=request_slots.device)
    if num_slots and len(request_rows):
        lens = _lens(starts, ends, request_slots.shape[1])
        _assign_extend_slots[(len(request_rows),)](
            request_slots,
            request_rows,
            starts,
            lens,
            lens.cumsum(0),
            out,
            request_slots.stride(0),
            num_slots,
            BLOCK=256,
        )
    return out


def assign_extend_slots(
    request_slots: torch.Tensor,
    request_rows: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    num_slots: int,
    *,
    backend: Backend,
) -> torch.Tensor:
    """See the module. Raises ValueError naming the argument that does not fit."""
    requests = len(request_rows)
    expect("request_slots", request_slots, (None, None), torch.long)
    expect("request_rows", request_rows, (requests,), torch.long)
    expect("starts", starts, (requests,), torch.long)
    expect("ends", ends, (requests,), torch.long)
    if num_slots < 0:
        raise ValueError(f"num_slots={num_slots}: must be at least the sum of ends - starts")
    if backend == "torch":
        return reference(request_slots, request_rows, starts, ends, num_slots)
    tensors = {"request_slots": request_slots, "request_rows": request_rows, "starts": starts, "ends": ends}
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(request_slots, request_rows, starts, ends, num_slots)


KERNEL = Kernel(
    name="assign_extend_slots",
    shapes="request_slots [R, W], request_rows [N], starts [N], ends [N] -> slots [num_slots]",
    call=assign_extend_slots,
    reference=reference,
    variants=(
        Variant(
            function=_assign_extend_slots,
            signature={
                "table_ptr": "*i64",
                "request_rows_ptr": "*i64",
                "starts_ptr": "*i64",
                "lens_ptr": "*i64",
                "cu_lens_ptr": "*i64",
                "out_ptr": "*i64",
                "table_stride": "i64",
                "num_slots": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 256},
        ),
    ),
    properties=("equals reference", "ragged", "empty ranges", "table end", "tight and loose bound", "int64 offsets"),
)
