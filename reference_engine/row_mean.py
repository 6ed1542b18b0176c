"""The mean of a request's final-norm rows, summed up as they come; no row is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

PooledRows = Literal["prompt", "output", "both"]
POOLED_ROWS: tuple[PooledRows, ...] = ("prompt", "output", "both")


@dataclass(slots=True)
class RowMean:
    """`which` rows count: those of the prompt, of output tokens that were an input, or both. `total` [width] is their
    sum in float64, `prompt_count` and `output_count` how many there were."""

    which: PooledRows
    total: torch.Tensor | None = None
    prompt_count: int = 0
    output_count: int = 0

    @property
    def needs_prompt(self) -> bool:
        return self.which != "output"

    def add_prompt(self, rows: torch.Tensor) -> None:
        """Rows [n, width] of one chunk."""
        if self.needs_prompt:
            self.prompt_count += len(rows)
            self._add(rows)

    def add_output(self, rows: torch.Tensor) -> None:
        """Rows [n, width] that stand for n emitted tokens: those that predicted them."""
        if self.which != "prompt":
            self.output_count += len(rows)
            self._add(rows)

    def _add(self, rows: torch.Tensor) -> None:
        part = rows.double().sum(0)
        self.total = part if self.total is None else self.total + part

    def start_again(self) -> None:
        """Forget what an unfinished prefill has added: it will be computed again."""
        assert self.output_count == 0, "output was pooled before the prompt had been"
        self.total, self.prompt_count = None, 0

    def mean(self, prompt_len: int) -> torch.Tensor | None:
        """[width] float64, in storage of its own; None when there is no row, or the prompt was not finished."""
        count = self.prompt_count + self.output_count
        if self.total is None or count == 0 or (self.needs_prompt and self.prompt_count < prompt_len):
            return None
        return self.total / count
