"""Attention over a paged KV cache, grouped heads: decode, extend and tree verify are one kernel.

query [N * Q, heads, head_dim] float32, float16 or bfloat16 (token and head strides free): Q queries a request; cache
[2 * kv_heads, pages, page_size, head_dim]: one layer, keys before values, same dtype, any strides but the last;
block_table [N, P] int64 (rows may be strided): column c of a request is in page block_table[c // page_size];
cache_positions [N, Q] int64: where each query's own token sits. Query head h reads key head h // (heads / kv_heads).
Without a window a query sees columns 0 .. its cache position. With window_start [N] int64 and window_mask [N, Q, W]
bool it sees every column before the window, of the window those that its mask row allows, and none after (draft trees;
cache_positions is not read). Columns past the block table are never seen; a query that sees nothing gives zeros, and
what no query of a request sees may hold anything. Returns [N * Q, heads, head_dim] in the query's dtype.

Sums are float32 with an online softmax (Dao et al. 2022; paging as in Kwon et al. 2023). Against the reference, a plain
softmax in float32: 1e-5 in float32; in half precision probabilities are rounded to it before they meet the values, 2e-3
in float16 and 2e-2 in bfloat16 for values around 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together

BLOCK_M = 16
BLOCK_N = {torch.float32: 16, torch.float16: 32, torch.bfloat16: 32}
WARPS = {torch.float32: 8, torch.float16: 4, torch.bfloat16: 4}
"""A tile of queries is small: what is verified is k + 1 queries long. Sums in float32 want more registers."""


@triton.jit(do_not_specialize=["windowed", "window_width"])
def _paged_attention(
    query_ptr,
    cache_ptr,
    out_ptr,
    block_table_ptr,
    cache_positions_ptr,
    window_start_ptr,
    window_mask_ptr,
    scale,
    token_stride,
    head_stride,
    cache_head_stride,
    page_stride,
    slot_stride,
    table_stride,
    positions_stride,
    mask_row_stride,
    mask_query_stride,
    num_queries,
    num_kv_heads,
    group,
    head_dim,
    page_size,
    num_columns,
    windowed,
    window_width,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    # The query heads of one key head are further rows of the tile.
    tile_row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = tile_row // group
    head = kv_head * group + tile_row % group
    real = query < num_queries
    dim = tl.arange(0, BLOCK_D)
    token = row * num_queries + query
    q_ptrs = query_ptr + (token * token_stride + head * head_stride)[:, None] + dim[None, :]
    q = tl.load(q_ptrs, mask=real[:, None] & (dim < head_dim)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    # All columns up to `last` are seen, of the window those that its mask allows. Without one it starts past the end.
    start = tl.load(window_start_ptr + row, mask=windowed != 0, other=num_columns)
    position_ptrs = cache_positions_ptr + row * positions_stride + query
    position = tl.load(position_ptrs, mask=real & (query * 0 + windowed == 0), other=-1)
    last = tl.where(windowed != 0, start - 1, position)
    end = tl.where(windowed != 0, start + window_width, tl.max(position, axis=0) + 1)
    end = tl.minimum(end, num_columns)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    for base in range(0, end, BLOCK_N):
        column = base + tl.arange(0, BLOCK_N)
        inside = column - start
        in_window = (inside >= 0) & (column < end)
        mask_ptrs = window_mask_ptr + row * mask_row_stride + (query.to(tl.int64) * mask_query_stride)[:, None]
        allowed = tl.load(mask_ptrs + inside[None, :], mask=real[:, None] & in_window[None, :], other=0)
        before = real[:, None] & (column < end)[None, :] & (column[None, :] <= last[:, None])
        sees = before | (allowed != 0)
        used = tl.max(sees.to(tl.int32), axis=0) > 0
        page = tl.load(block_table_ptr + row * table_stride + column // page_size, mask=used, other=0)
        slot = page * page_stride + column % page_size * slot_stride
        kv_mask = used[:, None] & (dim < head_dim)[None, :]
        kv_ptrs = cache_ptr + kv_head * cache_head_stride + slot[:, None] + dim[None, :]
        k = tl.load(kv_ptrs, mask=kv_mask, other=0.0)
        v = tl.load(kv_ptrs + num_kv_heads * cache_head_stride, mask=kv_mask, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(sees, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, axis=1))
        # A row that has seen nothing yet has no maximum to take off.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp(score - shift[:, None])
        fade = tl.exp(row_max - shift)
        total = total * fade + tl.sum(weight, axis=1)
        acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        row_max = new_max
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_ptrs = out_ptr + ((token * num_kv_heads * group + head) * head_dim)[:, None] + dim[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (dim < head_dim)[None, :])


def _sees(
    block_table: torch.Tensor,
    cache_positions: torch.Tensor,
    window_start: torch.Tensor | None,
    window_mask: torch.Tensor | None,
    page_size: int,
) -> torch.Tensor:
    """[N, Q, columns] bool."""
    column = torch.arange(block_table.shape[1] * page_size, device=block_table.device)
    if window_start is None or window_mask is None:
        return column <= cache_positions[:, :, None]
    inside = (column - window_start[:, None])[:, None].expand(-1, window_mask.shape[1], -1)
    # Two more columns: what lies behind the window, and what lies before it.
    padded = torch.nn.functional.pad(window_mask, (0, 1), value=False)
    padded = torch.nn.functional.pad(padded, (0, 1), value=True)
    width = window_mask.shape[2]
    return padded.gather(2, torch.where(inside < 0, width + 1, inside.clamp(max=width)))


def reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_positions: torch.Tensor,
    window_start: torch.Tensor | None,
    window_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    (rows, num_queries), kv_heads = cache_positions.shape, cache.shape[0] // 2
    heads, head_dim = query.shape[1:]
    wide = torch.promote_types(query.dtype, torch.float32)
    sees = _sees(block_table, cache_positions, window_start, window_mask, cache.shape[2])
    used = sees.any(1)
    # A page that nobody sees need not exist.
    pages = torch.where(used.unflatten(1, (-1, cache.shape[2])).any(-1), block_table, 0)
    kv = cache[:, pages].flatten(2, 3).to(wide).masked_fill(~used[None, :, :, None], 0.0)
    keys, values = kv.view(2, kv_heads, rows, sees.shape[2], head_dim)
    q = query.to(wide).view(rows, num_queries, kv_heads, heads // kv_heads, head_dim)
    score = torch.einsum("nqkgd,knsd->nqkgs", q, keys) * scale
    weight = score.masked_fill(~sees[:, :, None, None], float("-inf")).softmax(-1)
    weight = weight.masked_fill(~sees[:, :, None, None], 0.0)
    out = torch.einsum("nqkgs,knsd->nqkgd", weight, values)
    return out.reshape(rows * num_queries, heads, head_dim).to(query.dtype)


def launch(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_positions: torch.Tensor,
    window_start: torch.Tensor | None,
    window_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    (rows, num_queries), kv_heads, page_size = cache_positions.shape, cache.shape[0] // 2, cache.shape[2]
    heads, head_dim = query.shape[1:]
    group = heads // kv_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    wide = query.dtype == torch.float32
    # The interpreter multiplies bfloat16 as if it were integers.
    upcast = wide or (query.dtype == torch.bfloat16 and not query.is_cuda)
    windowed = window_start is not None and window_mask is not None
    if window_start is None or window_mask is None:
        window_start, window_mask = cache_positions, torch.empty(0, 0, 0, dtype=torch.bool, device=query.device)
    _paged_attention[(rows, kv_heads, triton.cdiv(num_queries * group, BLOCK_M))](
        query,
        cache,
        out,
        block_table,
        cache_positions,
        window_start,
        window_mask,
        scale,
        query.stride(0),
        query.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        block_table.stride(0),
        cache_positions.stride(0),
        *window_mask.stride()[:2],
        num_queries,
        kv_heads,
        group,
        head_dim,
        page_size,
        block_table.shape[1] * page_size,
        int(windowed),
        window_mask.shape[2],
        UPCAST=upcast,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N[query.dtype],
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=WARPS[query.dtype],
        num_stages=1,
    )
    return out


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_positions: torch.Tensor,
    *,
    window_start: torch.Tensor | None = None,
    window_mask: torch.Tensor | None = None,
    scale: float | None = None,
    backend: Backend,
) -> torch.Tensor:
    """See the module. `scale` defaults to head_dim ** -0.5. The reference also takes float64. Raises ValueError naming
    the argument that does not fit."""
    rows, num_queries = cache_positions.shape
    expect("cache_positions", cache_positions, (rows, num_queries), torch.long)
    expect("block_table", block_table, (rows, None), torch.long)
    expect("query", query, (rows * num_queries, None, None))
    expect("cache", cache, (None, None, None, query.shape[2]), query.dtype)
    if cache.shape[0] == 0 or cache.shape[0] % 2 or query.shape[1] % (cache.shape[0] // 2):
        raise ValueError(f"cache.shape[0]={cache.shape[0]}: must be 2 * kv_heads with {query.shape[1]} % kv_heads == 0")
    if (window_start is None) != (window_mask is None):
        raise ValueError("window_start and window_mask must be given together, or neither")
    if window_start is not None and window_mask is not None:
        expect("window_start", window_start, (rows,), torch.long)
        expect("window_mask", window_mask, (rows, num_queries, None), torch.bool)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    if backend == "torch":
        return reference(query, cache, block_table, cache_positions, window_start, window_mask, scale)
    expect("query", query, (None, None, None), torch.float32, torch.float16, torch.bfloat16)
    tensors = {"query": query, "cache": cache, "block_table": block_table, "cache_positions": cache_positions}
    if window_start is not None and window_mask is not None:
        tensors |= {"window_start": window_start, "window_mask": window_mask}
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(query, cache, block_table, cache_positions, window_start, window_mask, scale)


def _variant(dtype: torch.dtype) -> Variant:
    kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    names = _paged_attention.arg_names
    pointers = {"query_ptr": kind, "cache_ptr": kind, "out_ptr": kind, "window_mask_ptr": "i1", "scale": "fp32"}
    signature = {}
    for name in names:
        if name.isupper():
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = f"*{pointers.get(name, 'i64')}"
        else:
            signature[name] = "fp32" if name == "scale" else "i64" if name.endswith("stride") else "i32"
    constants = {
        "UPCAST": dtype == torch.float32,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N[dtype],
        "BLOCK_D": 128,
    }
    aligned = ("query_ptr", "cache_ptr", "out_ptr", "head_dim")
    strides = ("token_stride", "head_stride", "cache_head_stride", "page_stride", "slot_stride")
    return Variant(
        function=_paged_attention,
        signature=signature,
        constexprs=constants,
        divisible=aligned + strides,
        num_warps=WARPS[dtype],
        num_stages=1,
    )


KERNEL = Kernel(
    name="paged_attention",
    shapes="query [N*Q, heads, head_dim], cache [2*kv_heads, pages, page_size, head_dim], block_table [N, P], "
    "cache_positions [N, Q] (, window_start [N], window_mask [N, Q, W]) -> [N*Q, heads, head_dim]",
    call=paged_attention,
    reference=reference,
    variants=tuple(_variant(dtype) for dtype in (torch.float32, torch.bfloat16)),
    properties=(
        "within tolerance",
        "decode, extend, tree",
        "grouped heads",
        "unseen KV is NaN",
        "strided",
        "every dtype",
    ),
)
