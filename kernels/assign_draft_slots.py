"""KV slots that a request's drafts will be written to: the next ones of its row in the request-to-slot table.

request_slots [R, W] int64: slot of each token position of each table row (rows may be strided); request_rows [N] int64;
seq_lens [N] int64: committed tokens. Returns [N, num_slots] int64, num_slots = topk * num_steps: table entries
seq_len .. seq_len + num_slots - 1, and -1 where the table ends. Semantics: SGLang's
assign_draft_cache_locs, contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together


@triton.jit
def _assign_draft_slots(
    table_ptr,
    request_rows_ptr,
    seq_lens_ptr,
    out_ptr,
    table_stride,
    table_width,
    num_slots,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    table_ptr += tl.load(request_rows_ptr + request) * table_stride
    seq_len = tl.load(seq_lens_ptr + request)
    for base in range(0, num_slots, BLOCK):
        column = base + tl.arange(0, BLOCK)
        inside = (column < num_slots) & (seq_len + column < table_width)
        slot = tl.load(table_ptr + seq_len + column, mask=inside, other=-1)
        tl.store(out_ptr + request * num_slots + column, slot, mask=column < num_slots)


def reference(
    request_slots: torch.Tensor, request_rows: torch.Tensor, seq_lens: torch.Tensor, num_slots: int
) -> torch.Tensor:
    width = request_slots.shape[1]
    column = seq_lens[:, None] + torch.arange(num_slots, device=seq_lens.device)
    found = request_slots[request_rows[:, None], column.clamp(max=width - 1)]
    return torch.where(column < width, found, -1)


def launch(
    request_slots: torch.Tensor, request_rows: torch.Tensor, seq_lens: torch.Tensor, num_slots: int
) -> torch.Tensor:
    requests = len(request_rows)
    out = torch.empty(requests, num_slots, dtype=torch.long, device=request_slots.device)
    if out.numel():
        _assign_draft_slots[(requests,)](
            request_slots,
            request_rows,
            seq_lens,
            out,
            request_slots.stride(0),
            request_slots.shape[1],
            num_slots,
            BLOCK=32,
            num_warps=1,
        )
    return out


def assign_draft_slots(
    request_slots: torch.Tensor,
    request_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    num_slots: int,
    *,
    backend: Backend,
) -> torch.Tensor:
    """See the module. Raises ValueError naming the argument that does not fit."""
    requests = len(request_rows)
    expect("request_slots", request_slots, (None, None), torch.long)
    expect("request_rows", request_rows, (requests,), torch.long)
    expect("seq_lens", seq_lens, (requests,), torch.long)
    if num_slots < 0:
        raise ValueError(f"num_slots={num_slots}: must be topk * num_steps, at least 0")
    if backend == "torch":
        return reference(request_slots, request_rows, seq_lens, num_slots)
    tensors = {"request_slots": request_slots, "request_rows": request_rows, "seq_lens": seq_lens}
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(request_slots, request_rows, seq_lens, num_slots)


KERNEL = Kernel(
    name="assign_draft_slots",
    shapes="request_slots [R, W], request_rows [N], seq_lens [N] -> draft_slots [N, topk*num_steps]",
    call=assign_draft_slots,
    reference=reference,
    variants=(
        Variant(
            function=_assign_draft_slots,
            signature={
                "table_ptr": "*i64",
                "request_rows_ptr": "*i64",
                "seq_lens_ptr": "*i64",
                "out_ptr": "*i64",
                "table_stride": "i64",
                "table_width": "i32",
                "num_slots": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 32},
            num_warps=1,
        ),
    ),
    properties=("equals reference", "table end", "strided rows", "int64 offsets", "no slots", "empty batch"),
)
