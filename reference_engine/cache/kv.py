"""Paged KV storage and the address arithmetic around it.

Page 0 is the null page: padded rows and columns past a request's pages point at it, it holds finite junk and belongs
to nobody. A slot is page * page_size + offset; a request's token at position p lives in
block_table[p // page_size].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.base import Backend
from kernels.compact_accepted_slots import compact_accepted_slots
from kernels.move_kv_rows import move_kv_rows
from reference_engine.config import EngineConfig
from reference_engine.model.config import ModelConfig

if TYPE_CHECKING:
    from reference_engine.cache.recurrent import RecurrentPass

NULL_PAGE = 0
POISON = 30000.0
"""What freed and unwritten KV holds when poisoned: finite, so that masked columns stay without effect, and far from
anything that a model computes, so that an unmasked one does not."""


class KVLayer:
    """One layer: `pages` [2 * kv_heads, num_pages + 1, page_size, head_dim], keys before values, so that a page of one
    head is one contiguous piece; `slots` is the same memory, [2 * kv_heads, num_slots, head_dim]."""

    def __init__(self, pages: torch.Tensor, backend: Backend) -> None:
        self.pages = pages
        self.backend = backend
        self.slots = pages.flatten(1, 2)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """rows [n, 2 * kv_heads, head_dim] into slots [n]."""
        self.slots.index_copy_(1, slots, rows.transpose(0, 1))

    def gather(self, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """pages [N, n] -> keys and values, [N, kv_heads, n * page_size, head_dim] each."""
        read = self.pages.index_select(1, pages.view(-1))
        return read.view(2, len(read) // 2, len(pages), -1, read.shape[3]).transpose(1, 2).unbind()


class KVCache:
    """Keys and values of one model for all pages of an engine."""

    def __init__(self, config: EngineConfig, model: ModelConfig, num_layers: int) -> None:
        self.page_size = config.page_size
        self.num_kv_heads = model.num_kv_heads
        self.backend = config.backend
        shape = (2 * model.num_kv_heads, config.total_pages + 1, config.page_size, model.head_dim)
        self.layers = [
            KVLayer(torch.zeros(shape, dtype=config.torch_dtype, device=config.device), config.backend)
            for _ in range(num_layers)
        ]
        if config.poison:
            self.poison(page for page in range(config.total_pages + 1) if page != NULL_PAGE)

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].slots.dtype

    @property
    def num_slots(self) -> int:
        return self.layers[0].slots.shape[1]

    def poison(self, pages: Iterable[int]) -> None:
        """Overwrite pages, so that any later read of freed memory shows."""
        index = torch.tensor(sorted(pages), dtype=torch.long, device=self.layers[0].slots.device)
        for layer in self.layers:
            layer.pages[:, index] = POISON

    def compact(self, slots: torch.Tensor, accept_index: torch.Tensor, accept_lens: torch.Tensor) -> None:
        """Move the accepted path [N, w] of verify windows, whose rows are in slots [N, n], to the front of each."""
        source, target, _ = compact_accepted_slots(slots, accept_index, accept_lens, backend=self.backend)
        for layer in self.layers:
            move_kv_rows(layer.pages, source.flatten(), target.flatten(), backend=self.backend)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of rows: [n] slots -> [n, layers, 2, kv_heads, head_dim]."""
        rows = torch.stack([layer.slots[:, slots] for layer in self.layers])
        layers, _, count, dim = rows.shape
        return rows.view(layers, 2, self.num_kv_heads, count, dim).permute(3, 0, 1, 2, 4).contiguous()


@dataclass(slots=True)
class AttentionContext:
    """Where one forward pass writes and what each query may see; shared by all layers.

    `cache_positions` [N, Q] are places in the request's pages, `positions` [N, Q] the rotary ones. Row i of the pass
    goes to write_slots[i] ([N * Q]); `read_pages` [N, pages], contiguous; `bias` [N, 1, Q, columns] over the slots of
    these pages in order: 0 where a query may look, -inf elsewhere. The window is that of `attention_context`.
    `recurrent`: the states that recurrent layers start from and leave, for a model that has such layers.
    """

    cache_positions: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    read_pages: torch.Tensor
    bias: torch.Tensor
    window_start: torch.Tensor | None = None
    window_mask: torch.Tensor | None = None
    recurrent: RecurrentPass | None = None

    def columns(self) -> list[AttentionContext]:
        """A context for each query of a row, to be run one after another; there is no window."""
        assert self.window_start is None
        cache_positions, positions = (torch.split(x, 1, dim=1) for x in (self.cache_positions, self.positions))
        slots, biases = self.write_slots.view(self.positions.shape).unbind(1), torch.split(self.bias, 1, dim=2)
        return [
            AttentionContext(cache_position, position, slot, self.read_pages, bias)
            for cache_position, position, slot, bias in zip(cache_positions, positions, slots, biases, strict=True)
        ]


def places(
    block_table: torch.Tensor, cache_positions: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, pages] block table and [N, Q] cache positions -> pages [N, Q] and offsets in them."""
    index = torch.div(cache_positions, page_size, rounding_mode="floor")
    return block_table.gather(1, index), cache_positions % page_size


def slots_of(block_table: torch.Tensor, cache_positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """[N, pages] block table and [N, Q] cache positions -> [N, Q] slots."""
    pages, offsets = places(block_table, cache_positions, page_size)
    return pages * page_size + offsets


def attention_context(
    cache: KVCache,
    block_table: torch.Tensor,
    cache_positions: torch.Tensor,
    num_pages: int,
    *,
    valid: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    window_start: torch.Tensor | None = None,
    window_mask: torch.Tensor | None = None,
) -> AttentionContext:
    """Build the context for queries at `cache_positions` [N, Q] of requests with `block_table` [N, pages] in `cache`.

    `valid` [N, Q] marks real queries: the others write to the null page and see only column 0. Without a window the
    queries are causal over cache positions. With `window_start` [N] and `window_mask` [N, Q, W] they see everything
    before the window and, inside it, what the mask allows (draft trees); `positions` then carries the rotary
    positions, which differ from the cache positions. No query sees more than its first `num_pages` pages.
    """
    invalid = None if valid is None else ~valid
    if invalid is not None:
        cache_positions = cache_positions.masked_fill(invalid, 0)
    write_slots = slots_of(block_table, cache_positions, cache.page_size)
    if invalid is not None:
        write_slots = write_slots.masked_fill(invalid, NULL_PAGE * cache.page_size)
    columns = torch.arange(num_pages * cache.page_size, device=block_table.device)
    if window_mask is None:
        hidden = columns > cache_positions[:, :, None]
    else:
        assert window_start is not None
        inside = columns - window_start[:, None]
        num_queries, width = window_mask.shape[1:]
        allowed = window_mask.gather(2, inside.clamp(0, width - 1)[:, None].expand(-1, num_queries, -1))
        hidden = (inside >= 0)[:, None] & ~(allowed & (inside < width)[:, None])
    bias = torch.zeros(hidden.shape, dtype=cache.dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
    return AttentionContext(
        cache_positions=cache_positions,
        positions=cache_positions if positions is None else positions,
        write_slots=write_slots.view(-1),
        read_pages=block_table[:, :num_pages].contiguous(),
        bias=bias[:, None],
        window_start=window_start,
        window_mask=window_mask,
    )
