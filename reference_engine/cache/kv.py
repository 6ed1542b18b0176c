"""Paged KV storage and the address arithmetic around it.

Page 0 is the null page: padded rows and masked columns point at it, it holds finite junk and belongs to nobody.
A slot is page * page_size + offset; a request's token at position p lives in slot(block_table[p // page_size], p).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

NULL_PAGE = 0


class KVCache:
    """Keys and values of one model: a tensor [num_slots, 2, kv_heads, head_dim] for each layer."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        poison: bool,
    ) -> None:
        self.page_size = page_size
        shape = ((num_pages + 1) * page_size, 2, num_kv_heads, head_dim)
        fill = float("nan") if poison else 0.0
        self.layers = [torch.full(shape, fill, dtype=dtype, device=device) for _ in range(num_layers)]
        for layer in self.layers:
            layer[:page_size] = 0.0

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages with NaN, so that any later read of freed memory shows."""
        index = torch.tensor(sorted(pages), dtype=torch.long, device=self.layers[0].device)
        for layer in self.layers:
            layer.view(-1, self.page_size, *layer.shape[1:])[index] = float("nan")

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows between slots ([n] int64 each); everything is read before anything is written."""
        for layer in self.layers:
            layer[target] = layer[source]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of rows: [n] slots -> [n, layers, 2, kv_heads, head_dim]."""
        return torch.stack([layer[slots] for layer in self.layers], dim=1)


@dataclass(slots=True)
class AttentionContext:
    """Where one forward pass writes and what each query may see; shared by all layers.

    `positions` [N, Q] are rotary positions; `write_slots` [N * Q]; `read_slots` [N * L]; `mask` [N, 1, Q, L] bool.
    """

    positions: torch.Tensor
    write_slots: torch.Tensor
    read_slots: torch.Tensor
    mask: torch.Tensor


def slots_of(block_table: torch.Tensor, cache_positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """[N, pages] block table and [N, Q] cache positions -> [N, Q] slots."""
    pages = block_table.gather(1, torch.div(cache_positions, page_size, rounding_mode="floor"))
    return pages * page_size + cache_positions % page_size


def attention_context(
    block_table: torch.Tensor,
    page_size: int,
    cache_positions: torch.Tensor,
    max_kv_len: int,
    *,
    valid: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    window_start: torch.Tensor | None = None,
    window_mask: torch.Tensor | None = None,
) -> AttentionContext:
    """Build the context for queries at `cache_positions` [N, Q] of requests with `block_table` [N, pages].

    `valid` [N, Q] marks real queries: the others write to the null page and see only column 0. Without a window the
    queries are causal over cache positions. With `window_start` [N] and `window_mask` [N, Q, W] they see everything
    before the window and, inside it, what the mask allows (draft trees); `positions` then carries the rotary
    positions, which differ from the cache positions. `max_kv_len` bounds the columns that any query can see.
    """
    num_rows, num_queries = cache_positions.shape
    columns = torch.arange(max_kv_len, device=block_table.device)
    if valid is not None:
        cache_positions = torch.where(valid, cache_positions, 0)
    write = slots_of(block_table, cache_positions, page_size)
    if valid is not None:
        write = torch.where(valid, write, 0)
    written = columns <= cache_positions.amax(dim=1, keepdim=True)
    read = block_table[:, : -(-max_kv_len // page_size), None] * page_size + torch.arange(
        page_size, device=block_table.device
    )
    read = torch.where(written, read.view(num_rows, -1)[:, :max_kv_len], 0)
    if window_mask is None:
        mask = columns <= cache_positions[:, :, None]
    else:
        assert window_start is not None
        inside = columns - window_start[:, None]
        width = window_mask.shape[2]
        allowed = window_mask.gather(2, inside.clamp(0, width - 1)[:, None].expand(-1, num_queries, -1))
        mask = (inside < 0)[:, None] | (allowed & ((inside >= 0) & (inside < width))[:, None])
        if valid is not None:
            mask = torch.where(valid[:, :, None], mask, columns == 0)
    return AttentionContext(
        positions=cache_positions if positions is None else positions,
        write_slots=write.reshape(-1),
        read_slots=read.reshape(-1),
        mask=mask[:, None],
    )
