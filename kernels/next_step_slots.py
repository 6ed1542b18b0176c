"""Addresses of the next draft step: every request moves on by one token, unless it is at its context limit.

positions [N] int64: the last token fed; seq_lens [N] int64: KV entries visible to it; block_table [N, pages] int64
(rows may be strided). Returns positions + 1 [N], slots [num_padded] and seq_lens + 1 [N], all int64. A slot is
page * page_size + offset, of the new position. At the limit (position + 1 >= context_length, or no page for it) the
request must neither write KV nor read much: position 0, `pad_slot`, length 1. Rows N..num_padded are `pad_slot`.
Semantics: vLLM's eagle_step_slot_mapping_metadata_kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together

Addresses = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit
def _next_step_slots(
    positions_ptr,
    seq_lens_ptr,
    block_table_ptr,
    new_positions_ptr,
    slots_ptr,
    new_seq_lens_ptr,
    num_requests,
    num_padded,
    table_stride,
    num_pages,
    page_size,
    context_length,
    pad_slot,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = row < num_requests
    position = tl.load(positions_ptr + row, mask=real, other=-1) + 1
    page = position // page_size
    inside = real & (position >= 0) & (position < context_length) & (page < num_pages)
    block = tl.load(block_table_ptr + row * table_stride + page, mask=inside, other=0)
    slot = tl.where(inside, block * page_size + position % page_size, pad_slot)
    seq_len = tl.load(seq_lens_ptr + row, mask=real, other=0) + 1
    tl.store(slots_ptr + row, slot, mask=row < num_padded)
    tl.store(new_positions_ptr + row, tl.where(inside, position, 0), mask=real)
    tl.store(new_seq_lens_ptr + row, tl.where(inside, tl.minimum(seq_len, context_length), 1), mask=real)


def reference(
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    context_length: int,
    num_padded: int,
    pad_slot: int,
) -> Addresses:
    position = positions + 1
    page = torch.div(position, page_size, rounding_mode="floor")
    inside = (position >= 0) & (position < context_length) & (page < block_table.shape[1])
    if block_table.shape[1] == 0:
        slot = torch.full_like(position, pad_slot)
    else:
        block = block_table.gather(1, torch.where(inside, page, 0)[:, None])[:, 0]
        slot = torch.where(inside, block * page_size + position % page_size, pad_slot)
    slots = torch.cat([slot, slot.new_full((num_padded - len(slot),), pad_slot)])
    lens = torch.where(inside, (seq_lens + 1).clamp(max=context_length), 1)
    return torch.where(inside, position, 0), slots, lens


def launch(
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    context_length: int,
    num_padded: int,
    pad_slot: int,
) -> Addresses:
    rows, block = len(positions), 128
    new_positions = torch.empty(rows, dtype=torch.long, device=positions.device)
    slots = torch.empty(num_padded, dtype=torch.long, device=positions.device)
    new_seq_lens = torch.empty(rows, dtype=torch.long, device=positions.device)
    if num_padded:
        _next_step_slots[(triton.cdiv(num_padded, block),)](
            positions,
            seq_lens,
            block_table,
            new_positions,
            slots,
            new_seq_lens,
            rows,
            num_padded,
            block_table.stride(0),
            block_table.shape[1],
            page_size,
            context_length,
            pad_slot,
            BLOCK=block,
        )
    return new_positions, slots, new_seq_lens


def next_step_slots(
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    context_length: int,
    *,
    num_padded: int | None = None,
    pad_slot: int = -1,
    backend: Backend,
) -> Addresses:
    """See the module. `num_padded` defaults to N. Raises ValueError naming the argument that does not fit."""
    rows = len(positions)
    num_padded = rows if num_padded is None else num_padded
    expect("positions", positions, (rows,), torch.long)
    expect("seq_lens", seq_lens, (rows,), torch.long)
    expect("block_table", block_table, (rows, None), torch.long)
    for name, value, least in (
        ("page_size", page_size, 1),
        ("context_length", context_length, 1),
        ("num_padded", num_padded, rows),
    ):
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    if backend == "torch":
        return reference(positions, seq_lens, block_table, page_size, context_length, num_padded, pad_slot)
    tensors = {"positions": positions, "seq_lens": seq_lens, "block_table": block_table}
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(positions, seq_lens, block_table, page_size, context_length, num_padded, pad_slot)


KERNEL = Kernel(
    name="next_step_slots",
    shapes="positions [N], seq_lens [N], block_table [N, pages] -> positions [N], slots [padded], seq_lens [N]",
    call=next_step_slots,
    reference=reference,
    variants=(
        Variant(
            function=_next_step_slots,
            signature={
                "positions_ptr": "*i64",
                "seq_lens_ptr": "*i64",
                "block_table_ptr": "*i64",
                "new_positions_ptr": "*i64",
                "slots_ptr": "*i64",
                "new_seq_lens_ptr": "*i64",
                "num_requests": "i32",
                "num_padded": "i32",
                "table_stride": "i64",
                "num_pages": "i32",
                "page_size": "i32",
                "context_length": "i32",
                "pad_slot": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 128},
        ),
    ),
    properties=("equals reference", "context limit", "missing pages", "padded rows", "strided rows", "empty batch"),
)
