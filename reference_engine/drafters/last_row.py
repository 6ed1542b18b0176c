"""What the drafters share that read one row of the target, the one that predicted the bonus token, and keep no KV."""

from __future__ import annotations

import torch

from reference_engine.cache.kv import slots_of
from reference_engine.config import EngineConfig
from reference_engine.drafters.base import InputShadow, LogitsDrafter, ProposeInputs
from reference_engine.model.causal_lm import CausalLM
from reference_engine.sampling.random import RandomSource


class LastRowDrafter(LogitsDrafter):
    """Its state between steps is nothing; what it was fed last is remembered where that row's KV lies."""

    def __init__(self, config: EngineConfig, target: CausalLM, random: RandomSource) -> None:
        assert config.spec is not None
        super().__init__(config.spec, target.config.vocab_size, random, config.backend)
        self.page_size = config.page_size
        if config.snapshots:
            slots = (config.total_pages + 1) * config.page_size
            self.shadow = InputShadow(torch.full((slots,), -1), torch.zeros(slots, target.config.hidden_size))

    def last_row(self, inputs: ProposeInputs, next_token_ids: torch.Tensor) -> torch.Tensor:
        """The last processed row of each request [N, hidden]; next_token_ids [N] follow it."""
        last = _last(inputs)[:, :, None].expand(-1, 1, inputs.hidden.shape[2])
        rows = inputs.hidden.gather(1, last)[:, 0]
        if self.shadow is not None:
            slots = slots_of(inputs.block_table, last_positions(inputs), self.page_size)[:, 0]
            self.shadow.remember(slots, next_token_ids, rows)
        return rows

    def fed(self, slots: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The bonus token and the row that predicted it."""
        return super().fed(slots[-2:-1])  # lookahead is 0


def last_positions(inputs: ProposeInputs) -> torch.Tensor:
    """Position [N, 1] of the last processed token of each request."""
    return inputs.positions.gather(1, _last(inputs))


def _last(inputs: ProposeInputs) -> torch.Tensor:
    """Its column [N, 1]."""
    return (inputs.num_rows - 1).clamp(min=0)[:, None]
