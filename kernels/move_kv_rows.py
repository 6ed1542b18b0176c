"""KV rows move between slots, in place; everything is read before anything is written, so ranges may overlap.

cache [2 * kv_heads, pages, page_size, head_dim], any dtype, any strides but the last: one layer, keys before values;
source, target [M] int64: slots (page * page_size + offset). A pair of which either is outside the cache (-1, say) is
skipped; targets are distinct. Returns cache. Semantics: compaction of an accepted path after a tree verify, as SGLang's
move_kv_cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together


@triton.jit
def _copy_rows(
    cache_ptr,
    rows_ptr,
    slots_ptr,
    other_slots_ptr,
    head_stride,
    page_stride,
    slot_stride,
    num_slots,
    num_moves,
    page_size,
    head_dim,
    GATHER: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row of one head, from the cache to rows [heads, M, head_dim] (GATHER) or back."""
    move = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + move)
    other_slot = tl.load(other_slots_ptr + move)
    dim = tl.arange(0, BLOCK_D)
    moves = (slot >= 0) & (slot < num_slots) & (other_slot >= 0) & (other_slot < num_slots)
    mask = dim < tl.where(moves, head_dim, 0)
    in_cache = cache_ptr + head * head_stride + slot // page_size * page_stride + slot % page_size * slot_stride + dim
    in_rows = rows_ptr + (head * num_moves + move) * head_dim + dim
    if GATHER:
        tl.store(in_rows, tl.load(in_cache, mask=mask, other=0), mask=mask)
    else:
        tl.store(in_cache, tl.load(in_rows, mask=mask, other=0), mask=mask)


def reference(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    page_size, num_slots = cache.shape[2], cache.shape[1] * cache.shape[2]
    moves = (source >= 0) & (source < num_slots) & (target >= 0) & (target < num_slots)
    source, target = source[moves], target[moves]
    cache[:, target // page_size, target % page_size] = cache[:, source // page_size, source % page_size]
    return cache


def launch(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    heads, pages, page_size, head_dim = cache.shape
    moves = len(source)
    if moves == 0 or cache.numel() == 0:
        return cache
    # By way of a buffer: a second launch begins when the first has read everything, whatever the rows overlap.
    rows = torch.empty(heads, moves, head_dim, dtype=cache.dtype, device=cache.device)
    for gather, slots, other_slots in ((True, source, target), (False, target, source)):
        _copy_rows[(moves, heads)](
            cache,
            rows,
            slots,
            other_slots,
            cache.stride(0),
            cache.stride(1),
            cache.stride(2),
            pages * page_size,
            moves,
            page_size,
            head_dim,
            GATHER=gather,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=1,
        )
    return cache


def move_kv_rows(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor, *, backend: Backend) -> torch.Tensor:
    """See the module. Raises ValueError naming the tensor that does not fit."""
    expect("cache", cache, (None, None, None, None))
    expect("source", source, (None,), torch.long)
    expect("target", target, (len(source),), torch.long)
    if backend == "torch":
        return reference(cache, source, target)
    tensors = {"cache": cache, "source": source, "target": target}
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(cache, source, target)


KERNEL = Kernel(
    name="move_kv_rows",
    shapes="cache [2*kv_heads, pages, page_size, head_dim], source [M], target [M] -> cache, in place",
    call=move_kv_rows,
    reference=reference,
    variants=tuple(
        Variant(
            function=_copy_rows,
            signature={
                "cache_ptr": f"*{kind}",
                "rows_ptr": f"*{kind}",
                "slots_ptr": "*i64",
                "other_slots_ptr": "*i64",
                "head_stride": "i64",
                "page_stride": "i64",
                "slot_stride": "i64",
                "num_slots": "i64",
                "num_moves": "i32",
                "page_size": "i32",
                "head_dim": "i32",
                "GATHER": "constexpr",
                "BLOCK_D": "constexpr",
            },
            constexprs={"GATHER": gather, "BLOCK_D": 128},
            num_warps=1,
        )
        for kind in ("fp32", "bf16")
        for gather in (True, False)
    ),
    properties=("equals reference", "overlapping ranges", "-1 and foreign slots", "strided caches", "every dtype"),
)
