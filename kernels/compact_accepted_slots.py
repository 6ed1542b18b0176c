"""After a tree verify: which slot each accepted node's KV sits in, where it belongs, and which slots are free.

slots [N, n] int64: slots of the verify window, in order (rows may be strided); accept_index [N, w] int64: window nodes
of the accepted path, root first, -1 after it; accept_lens [N] int64 in 0..w (0 for padding rows). Returns source
[N, w]: slots of the accepted nodes; target [N, w]: the first accept_len slots of the window; both -1 after the accept
length and where a node is no window node, as `move_kv_rows` skips; free [N, n]: the window's other slots packed to the
left, then -1. All int64. Semantics: SGLang's get_target_cache_loc and the compaction that follows it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together

Slots = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit
def _compact_accepted_slots(
    slots_ptr,
    accept_index_ptr,
    accept_lens_ptr,
    source_ptr,
    target_ptr,
    free_ptr,
    slots_stride,
    index_stride,
    num_nodes,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slots_ptr += row * slots_stride
    column = tl.arange(0, BLOCK)
    accept_len = tl.minimum(tl.load(accept_lens_ptr + row), width)
    node = tl.load(accept_index_ptr + row * index_stride + column, mask=column < accept_len, other=-1)
    kept = (node >= 0) & (node < num_nodes) & (column < num_nodes)
    source = tl.load(slots_ptr + node, mask=kept, other=-1)
    target = tl.load(slots_ptr + column, mask=kept, other=-1)
    tl.store(source_ptr + row * width + column, source, mask=column < width)
    tl.store(target_ptr + row * width + column, target, mask=column < width)
    accept_len = tl.maximum(accept_len, 0)
    free = tl.load(slots_ptr + accept_len + column, mask=accept_len + column < num_nodes, other=-1)
    tl.store(free_ptr + row * num_nodes + column, free, mask=column < num_nodes)


def reference(slots: torch.Tensor, accept_index: torch.Tensor, accept_lens: torch.Tensor) -> Slots:
    (rows, num_nodes), width = slots.shape, accept_index.shape[1]
    column = torch.arange(width, device=slots.device)
    kept = (column < accept_lens[:, None]) & (accept_index >= 0) & (accept_index < num_nodes) & (column < num_nodes)
    source = torch.where(kept, slots.gather(1, torch.where(kept, accept_index, 0)), -1)
    front = slots.gather(1, column.clamp(max=num_nodes - 1).expand(rows, -1))
    behind = accept_lens.clamp(0, width)[:, None] + torch.arange(num_nodes, device=slots.device)
    free = torch.where(behind < num_nodes, slots.gather(1, behind.clamp(max=num_nodes - 1)), -1)
    return source, torch.where(kept, front, -1), free


def launch(slots: torch.Tensor, accept_index: torch.Tensor, accept_lens: torch.Tensor) -> Slots:
    (rows, num_nodes), width = slots.shape, accept_index.shape[1]
    source = torch.empty(rows, width, dtype=torch.long, device=slots.device)
    target = torch.empty(rows, width, dtype=torch.long, device=slots.device)
    free = torch.empty(rows, num_nodes, dtype=torch.long, device=slots.device)
    if rows:
        _compact_accepted_slots[(rows,)](
            slots,
            accept_index,
            accept_lens,
            source,
            target,
            free,
            slots.stride(0),
            accept_index.stride(0),
            num_nodes,
            width,
            BLOCK=triton.next_power_of_2(max(num_nodes, width)),
            num_warps=1,
        )
    return source, target, free


def compact_accepted_slots(
    slots: torch.Tensor, accept_index: torch.Tensor, accept_lens: torch.Tensor, *, backend: Backend
) -> Slots:
    """See the module. Raises ValueError naming the tensor that does not fit."""
    rows = len(slots)
    expect("slots", slots, (rows, None), torch.long)
    expect("accept_index", accept_index, (rows, None), torch.long)
    expect("accept_lens", accept_lens, (rows,), torch.long)
    if slots.shape[1] == 0:
        raise ValueError("slots.shape[1]=0: a verify window has at least its root")
    if backend == "torch":
        return reference(slots, accept_index, accept_lens)
    tensors = {"slots": slots, "accept_index": accept_index, "accept_lens": accept_lens}
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(slots, accept_index, accept_lens)


KERNEL = Kernel(
    name="compact_accepted_slots",
    shapes="slots [N, n], accept_index [N, w], accept_lens [N] -> source [N, w], target [N, w], free [N, n]",
    call=compact_accepted_slots,
    reference=reference,
    variants=tuple(
        Variant(
            function=_compact_accepted_slots,
            signature={
                "slots_ptr": "*i64",
                "accept_index_ptr": "*i64",
                "accept_lens_ptr": "*i64",
                "source_ptr": "*i64",
                "target_ptr": "*i64",
                "free_ptr": "*i64",
                "slots_stride": "i64",
                "index_stride": "i64",
                "num_nodes": "i32",
                "width": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": block},
            num_warps=1,
        )
        for block in (8, 64)
    ),
    properties=("equals reference", "ragged", "-1 on the path", "nodes out of range", "strided rows", "empty batch"),
)
