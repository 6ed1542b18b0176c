"""Moving slots between the request-to-slot table and flat lists of them, and rows between slots."""

from __future__ import annotations

import ctypes

import torch


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The slots of positions `start_offset` to `end_offset` of each request, one request after the other."""
    del pool_len
    at = 0
    for row, start, end in _ranges(req_pool_indices, start_offset, end_offset):
        out_cache_loc[at : at + end - start] = req_to_token[row, start:end]
        at += end - start


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The same ranges, from the flat list into the table."""
    del pool_len
    at = 0
    for row, start, end in _ranges(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """`topk * num_steps` slots of each request, from position `seq_lens` on."""
    room = topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, seq_lens + room, out_cache_loc, pool_len)


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """A table with one row per request and branch, [N * topk, pool_len]: the slots of what is committed, then those of
    the branch's own drafts. Branch b of a request drafts into its positions seq_len + b * num_steps and on."""
    table = torch.zeros(len(seq_lens) * topk, pool_len, dtype=req_to_token.dtype)
    for at, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        for branch in range(topk):
            start = length + branch * num_steps
            mine = table[at * topk + branch]
            mine[:length] = req_to_token[row, :length]
            mine[length : length + num_steps] = req_to_token[row, start : start + num_steps]
    return table


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """The slots that `accept_index` names (-1 = none), without gaps, in its order; what is behind them stays."""
    chosen = accept_index.reshape(-1)
    kept = out_cache_loc[chosen[chosen >= 0].long()]
    accept_out_cache_loc[: len(kept)] = kept.to(accept_out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """In every buffer, given by address and bytes per slot: the row of slot src_loc[i] becomes that of tgt_loc[i]. A
    slot may be source and target: all rows are read before one is written."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * size, size) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + slot * size, row, size)


def _ranges(rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> list[tuple[int, int, int]]:
    return list(zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True))
