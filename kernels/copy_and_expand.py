"""Room for draft slots: copies each request's tokens into a longer row and fills what follows them.

Flat inputs: token_ids, positions [T] int64; query_start_loc [N + 1] int64 (starting at 0); num_rejected [N] int64: rows
at a request's end that do not count, at most all but one; next_token_ids [N] int64. A request with q rows of which v
count gets, with P = num_slots >= 1 draft slots,
  plain:    v ids, the next token, P - 1 mask tokens, then padding: q + P rows;
  shifted:  ids 1..v - 1, the next token, P - 1 mask tokens, then padding: q + P - 1 rows (feature drafters: row p holds
            the token after p).
Returns, flat over these rows: token_ids and positions int64 (running on from the request's first position; padding has
position 0), is_masked and is_rejected bool (mask tokens; padding); sample_index [N, P] int64: rows that predict the
drafts (next token and mask tokens); row_map [T] int64: the row that input row i went to, -1 for rejected ones. A
request without rows gets padding only, and -1 as its sample_index. Semantics: vLLM's
copy_and_expand_eagle_inputs_kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together


class Expanded(NamedTuple):
    token_ids: torch.Tensor
    positions: torch.Tensor
    is_masked: torch.Tensor
    is_rejected: torch.Tensor
    sample_index: torch.Tensor
    row_map: torch.Tensor


@triton.jit
def _copy_and_expand(
    token_ids_ptr,
    positions_ptr,
    query_start_ptr,
    num_rejected_ptr,
    next_ptr,
    out_ids_ptr,
    out_positions_ptr,
    is_masked_ptr,
    is_rejected_ptr,
    sample_index_ptr,
    row_map_ptr,
    num_slots,
    mask_token_id,
    pad_token_id,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - start
    valid = num_queries - tl.load(num_rejected_ptr + request)
    following = tl.load(next_ptr + request)
    extra = num_slots - SHIFT
    first = start + request * extra
    # Where the next token goes; a request without rows has no place for it.
    bonus = tl.where(num_queries > 0, valid - SHIFT, -num_slots)
    origin = tl.load(positions_ptr + start, mask=num_queries > 0, other=0)
    for base in range(0, num_queries + extra, BLOCK):
        column = base + tl.arange(0, BLOCK)
        inside = column < num_queries + extra
        token = tl.load(token_ids_ptr + start + column + SHIFT, mask=column < bonus, other=-1)
        masked = (column > bonus) & (column < bonus + num_slots)
        rejected = column >= bonus + num_slots
        token = tl.where(column == bonus, following, token)
        token = tl.where(masked, mask_token_id, tl.where(rejected, pad_token_id, token))
        tl.store(out_ids_ptr + first + column, token, mask=inside)
        tl.store(out_positions_ptr + first + column, tl.where(rejected, 0, origin + column), mask=inside)
        tl.store(is_masked_ptr + first + column, masked, mask=inside)
        tl.store(is_rejected_ptr + first + column, rejected, mask=inside)
        tl.store(row_map_ptr + start + column, tl.where(column < valid, first + column, -1), mask=column < num_queries)
    for slot in range(num_slots):
        index = tl.where(num_queries > 0, first + bonus + slot, -1)
        tl.store(sample_index_ptr + request * num_slots + slot, index)


def reference(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor,
    next_token_ids: torch.Tensor,
    num_slots: int,
    mask_token_id: int,
    pad_token_id: int,
    shift: bool,
) -> Expanded:
    device, requests, extra = token_ids.device, len(next_token_ids), num_slots - int(shift)
    lens = query_start_loc.diff()
    widths = lens + extra
    total = len(token_ids) + requests * extra
    owner = torch.repeat_interleave(torch.arange(requests, device=device), widths, output_size=total)
    first = query_start_loc[:-1] + extra * torch.arange(requests, device=device)
    column = torch.arange(total, device=device) - first[owner]
    valid = lens - num_rejected
    bonus = torch.where(lens > 0, valid - int(shift), -num_slots)
    source = query_start_loc[owner] + column + int(shift)
    after = column - bonus[owner]
    masked, rejected = (after > 0) & (after < num_slots), after >= num_slots
    padded = torch.cat([token_ids, token_ids.new_zeros(1)])
    token = padded[torch.where(after < 0, source, len(token_ids))]
    token = torch.where(after == 0, next_token_ids[owner], token)
    token = torch.where(masked, mask_token_id, torch.where(rejected, pad_token_id, token))
    origin = torch.cat([positions, positions.new_zeros(1)])[query_start_loc[:-1]]
    slots = torch.arange(num_slots, device=device)
    sample = torch.where((lens > 0)[:, None], (first + bonus)[:, None] + slots, -1)
    rows = torch.repeat_interleave(torch.arange(requests, device=device), lens, output_size=len(token_ids))
    offset = torch.arange(len(token_ids), device=device) - query_start_loc[rows]
    return Expanded(
        token_ids=token,
        positions=torch.where(rejected, 0, origin[owner] + column),
        is_masked=masked,
        is_rejected=rejected,
        sample_index=sample,
        row_map=torch.where(offset < valid[rows], first[rows] + offset, -1),
    )


def launch(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor,
    next_token_ids: torch.Tensor,
    num_slots: int,
    mask_token_id: int,
    pad_token_id: int,
    shift: bool,
) -> Expanded:
    device, requests = token_ids.device, len(next_token_ids)
    total = len(token_ids) + requests * (num_slots - int(shift))
    out = Expanded(
        token_ids=torch.empty(total, dtype=torch.long, device=device),
        positions=torch.empty(total, dtype=torch.long, device=device),
        is_masked=torch.empty(total, dtype=torch.bool, device=device),
        is_rejected=torch.empty(total, dtype=torch.bool, device=device),
        sample_index=torch.empty(requests, num_slots, dtype=torch.long, device=device),
        row_map=torch.empty(len(token_ids), dtype=torch.long, device=device),
    )
    if requests:
        _copy_and_expand[(requests,)](
            token_ids,
            positions,
            query_start_loc,
            num_rejected,
            next_token_ids,
            *out,
            num_slots,
            mask_token_id,
            pad_token_id,
            SHIFT=int(shift),
            BLOCK=128,
        )
    return out


def copy_and_expand(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor,
    next_token_ids: torch.Tensor,
    *,
    num_slots: int,
    mask_token_id: int,
    pad_token_id: int = 0,
    shift: bool = False,
    backend: Backend,
) -> Expanded:
    """See the module. Raises ValueError naming the argument that does not fit."""
    tokens, requests = len(token_ids), len(next_token_ids)
    tensors = {
        "token_ids": token_ids,
        "positions": positions,
        "query_start_loc": query_start_loc,
        "num_rejected": num_rejected,
        "next_token_ids": next_token_ids,
    }
    for (name, tensor), size in zip(tensors.items(), (tokens, tokens, requests + 1, requests, requests), strict=True):
        expect(name, tensor, (size,), torch.long)
    if num_slots < 1:
        raise ValueError(f"num_slots={num_slots}: must be at least 1, the slot of the next token")
    options = (num_slots, mask_token_id, pad_token_id, shift)
    if backend == "torch":
        return reference(token_ids, positions, query_start_loc, num_rejected, next_token_ids, *options)
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(token_ids, positions, query_start_loc, num_rejected, next_token_ids, *options)


KERNEL = Kernel(
    name="copy_and_expand",
    shapes="token_ids [T], positions [T], query_start_loc [N+1], num_rejected [N], next_token_ids [N] -> six, flat",
    call=copy_and_expand,
    reference=reference,
    variants=tuple(
        Variant(
            function=_copy_and_expand,
            signature={
                "token_ids_ptr": "*i64",
                "positions_ptr": "*i64",
                "query_start_ptr": "*i64",
                "num_rejected_ptr": "*i64",
                "next_ptr": "*i64",
                "out_ids_ptr": "*i64",
                "out_positions_ptr": "*i64",
                "is_masked_ptr": "*i1",
                "is_rejected_ptr": "*i1",
                "sample_index_ptr": "*i64",
                "row_map_ptr": "*i64",
                "num_slots": "i32",
                "mask_token_id": "i32",
                "pad_token_id": "i32",
                "SHIFT": "constexpr",
                "BLOCK": "constexpr",
            },
            constexprs={"SHIFT": shift, "BLOCK": 128},
        )
        for shift in (0, 1)
    ),
    properties=("equals reference", "ragged", "rejected rows", "requests without rows", "tile edges", "empty batch"),
)
