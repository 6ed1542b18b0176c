"""Rows of any width beside the KV of their tokens: in the same pages, so found, shared, freed and poisoned with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from reference_engine.cache.kv import NULL_PAGE, POISON, places
from reference_engine.config import EngineConfig


class PagedRows:
    """`rows` [total_pages + 1, page_size, width] in the engine's dtype, addressed by the target's block tables."""

    def __init__(self, config: EngineConfig, width: int) -> None:
        shape = (config.total_pages + 1, config.page_size, width)
        self.rows = torch.zeros(shape, dtype=config.torch_dtype, device=config.device)
        self.page_size = config.page_size
        if config.poison:
            self.rows[NULL_PAGE + 1 :] = POISON

    def write(
        self, block_table: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, valid: torch.Tensor
    ) -> None:
        """values [N, Q, width] to positions [N, Q] of requests with `block_table` [N, pages], where `valid` [N, Q]."""
        pages, offsets = places(block_table, torch.where(valid, positions, 0), self.page_size)
        self.rows[torch.where(valid, pages, NULL_PAGE), offsets] = values.to(self.rows.dtype)

    def read(self, pages: Sequence[int], count: int) -> torch.Tensor:
        """A copy of the first `count` rows in `pages`: [count, width]."""
        held = torch.tensor(pages[: -(-count // self.page_size)], dtype=torch.long, device=self.rows.device)
        return self.rows[held].flatten(0, 1)[:count].clone()

    def poison(self, pages: Iterable[int]) -> None:
        self.rows[torch.tensor(sorted(pages), dtype=torch.long, device=self.rows.device)] = POISON
