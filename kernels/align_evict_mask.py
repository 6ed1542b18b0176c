"""Eviction by whole pages: a slot of the verify window may go only if nothing on its page is kept.

evict_mask [N, n] bool: slots of each request's window that verification gave up (rows may be strided); seq_lens [N]
int64: committed tokens before the window, so that window slot j is on page (seq_len + j) // page_size. Returns [N, n]
bool: true where every window slot of the page is given up and no committed token is on it. Semantics: SGLang's
align_evict_mask_to_page_size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together


@triton.jit
def _align_evict_mask(
    evict_ptr,
    seq_lens_ptr,
    out_ptr,
    evict_stride,
    out_stride,
    num_nodes,
    page_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    evict_ptr += row * evict_stride
    column = tl.arange(0, BLOCK)
    seq_len = tl.load(seq_lens_ptr + row)
    page = (seq_len + column) // page_size
    evict = tl.load(evict_ptr + column, mask=column < num_nodes, other=0)
    # A page is held by its committed tokens, and by every slot of the window that stays.
    held = page * page_size < seq_len
    for slot in range(num_nodes):
        stays = tl.load(evict_ptr + slot) == 0
        held = held | (page == tl.where(stays, (seq_len + slot) // page_size, -1))
    tl.store(out_ptr + row * out_stride + column, (evict != 0) & (held == 0), mask=column < num_nodes)


def reference(evict_mask: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    page = (seq_lens[:, None] + torch.arange(evict_mask.shape[1], device=seq_lens.device)) // page_size
    kept = ((page[:, :, None] == page[:, None, :]) & ~evict_mask[:, None, :]).any(-1)
    return evict_mask & ~kept & (page * page_size >= seq_lens[:, None])


def launch(evict_mask: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    rows, num_nodes = evict_mask.shape
    out = torch.empty(rows, num_nodes, dtype=torch.bool, device=evict_mask.device)
    if out.numel():
        _align_evict_mask[(rows,)](
            evict_mask,
            seq_lens,
            out,
            evict_mask.stride(0),
            out.stride(0),
            num_nodes,
            page_size,
            BLOCK=triton.next_power_of_2(num_nodes),
            num_warps=1,
        )
    return out


def align_evict_mask(
    evict_mask: torch.Tensor, seq_lens: torch.Tensor, page_size: int, *, backend: Backend
) -> torch.Tensor:
    """See the module. Raises ValueError naming the argument that does not fit."""
    rows = len(evict_mask)
    expect("evict_mask", evict_mask, (rows, None), torch.bool)
    expect("seq_lens", seq_lens, (rows,), torch.long)
    if page_size < 1:
        raise ValueError(f"page_size={page_size}: must be at least 1")
    if backend == "torch":
        return reference(evict_mask, seq_lens, page_size)
    expect_inner_contiguous("evict_mask", evict_mask)
    expect_inner_contiguous("seq_lens", seq_lens)
    expect_together(evict_mask=evict_mask, seq_lens=seq_lens)
    return launch(evict_mask, seq_lens, page_size)


KERNEL = Kernel(
    name="align_evict_mask",
    shapes="evict_mask [N, n], seq_lens [N] -> evict_mask [N, n]",
    call=align_evict_mask,
    reference=reference,
    variants=tuple(
        Variant(
            function=_align_evict_mask,
            signature={
                "evict_ptr": "*i1",
                "seq_lens_ptr": "*i64",
                "out_ptr": "*i1",
                "evict_stride": "i64",
                "out_stride": "i64",
                "num_nodes": "i32",
                "page_size": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": block},
            num_warps=1,
        )
        for block in (8, 64)
    ),
    properties=("equals reference", "page sizes 1..16", "committed tokens on the page", "strided rows", "empty batch"),
)
