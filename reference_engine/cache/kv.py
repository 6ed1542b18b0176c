"""Paged KV storage and the address arithmetic around it.

Page 0 is the null page: padded rows and columns past a request's pages point at it, it holds finite junk and belongs
to nobody. A slot is page * page_size + offset; a request's token at position p lives in
block_table[p // page_size].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

NULL_PAGE = 0
POISON = 30000.0
"""What freed and unwritten KV holds when poisoned: finite, so that masked columns stay without effect, and far from
anything that a model computes, so that an unmasked one does not."""


class KVCache:
    """Keys and values of one model: a tensor [2 * kv_heads, num_pages + 1, page_size, head_dim] for each layer, keys
    before values, so that a page of one head is one contiguous piece."""

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
        self.num_kv_heads = num_kv_heads
        shape = (2 * num_kv_heads, num_pages + 1, page_size, head_dim)
        fill = POISON if poison else 0.0
        self.layers = [torch.full(shape, fill, dtype=dtype, device=device) for _ in range(num_layers)]
        for layer in self.layers:
            layer[:, NULL_PAGE] = 0.0

    @property
    def num_slots(self) -> int:
        return self.layers[0].shape[1] * self.page_size

    def poison(self, pages: Iterable[int]) -> None:
        """Overwrite pages, so that any later read of freed memory shows."""
        index = torch.tensor(sorted(pages), dtype=torch.long, device=self.layers[0].device)
        for layer in self.layers:
            layer[:, index] = POISON

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows between slots ([n] int64 each); everything is read before anything is written."""
        for layer in self.layers:
            slots = layer.flatten(1, 2)
            slots[:, target] = slots[:, source]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of rows: [n] slots -> [n, layers, 2, kv_heads, head_dim]."""
        rows = torch.stack([layer.flatten(1, 2)[:, slots] for layer in self.layers])
        layers, _, count, dim = rows.shape
        return rows.view(layers, 2, self.num_kv_heads, count, dim).permute(3, 0, 1, 2, 4).contiguous()


@dataclass(slots=True)
class AttentionContext:
    """Where one forward pass writes and what each query may see; shared by all layers.

    `positions` [N, Q] are rotary positions; `write_slots` [N * Q]; `read_pages` [N * pages]; `mask` [N, Q, columns]
    bool over the slots of these pages in order.
    """

    positions: torch.Tensor
    write_slots: torch.Tensor
    read_pages: torch.Tensor
    mask: torch.Tensor
    num_rows: int
    num_queries: int
    _grouped: tuple[int, torch.Tensor] | None = None

    def grouped_mask(self, group: int) -> torch.Tensor:
        """[1, N, group * Q, columns]: the mask for a key head that serves `group` query heads."""
        if self._grouped is None or self._grouped[0] != group:
            self._grouped = group, self.mask.repeat(1, group, 1)[None]
        return self._grouped[1]


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
    if valid is not None:
        cache_positions = torch.where(valid, cache_positions, 0)
    write = slots_of(block_table, cache_positions, page_size)
    if valid is not None:
        write = torch.where(valid, write, 0)
    num_pages = -(-max_kv_len // page_size)
    columns = torch.arange(num_pages * page_size, device=block_table.device)
    if window_mask is None:
        mask = columns <= cache_positions[:, :, None]
    else:
        assert window_start is not None
        inside = columns - window_start[:, None]
        num_queries, width = window_mask.shape[1:]
        allowed = window_mask.gather(2, inside.clamp(0, width - 1)[:, None].expand(-1, num_queries, -1))
        mask = (inside < 0)[:, None] | (allowed & ((inside >= 0) & (inside < width))[:, None])
    return AttentionContext(
        positions=cache_positions if positions is None else positions,
        write_slots=write.reshape(-1),
        read_pages=block_table[:, :num_pages].reshape(-1),
        mask=mask,
        num_rows=cache_positions.shape[0],
        num_queries=cache_positions.shape[1],
    )
