"""Recurrent state of running requests, and its checkpoints in the prefix cache.

Unlike KV, a state cannot be cut back to an earlier position: it must have been kept there. A forward pass therefore
leaves the state after each of its tokens, and once it is known how many of them count, `settle` makes the one after the
last of these the state of the request. Under speculation this rolls back over rejected drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from reference_engine.cache.kv import NULL_PAGE, POISON, places
from reference_engine.config import EngineConfig
from reference_engine.model.config import ModelConfig


@dataclass(slots=True)
class RecurrentPass:
    """What one forward pass over N x Q tokens starts from, and the states that it leaves.

    `initial` [layers, N, heads, key_dim, value_dim]: the state before the pass. `parents` [N, Q] int64: which token of
    the pass each one follows, earlier ones only, -1 = the one before the pass; None for a chain. `after` holds, for
    each recurrent layer that has run, the state after every token, [N, Q, heads, key_dim, value_dim].
    """

    initial: torch.Tensor
    parents: torch.Tensor | None = None
    after: list[torch.Tensor] = field(default_factory=list)

    def scan(self, gates: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        """The next layer's recurrence S = gate * S_before + update, token by token so that chunks change no bit.

        gates [N, Q, heads], updates [N, Q, heads, key_dim, value_dim] -> states after every token, like `updates`.
        """
        before = self.initial[len(self.after)]
        states = torch.cat([before[:, None], updates], dim=1)
        requests = torch.arange(len(before), device=before.device)
        for token in range(updates.shape[1]):
            previous = states[:, token] if self.parents is None else states[requests, self.parents[:, token] + 1]
            states[:, token + 1].addcmul_(gates[:, token, :, None, None], previous)
        self.after.append(states[:, 1:])
        return self.after[-1]


class RecurrentCache:
    """States in float32 or wider, whatever the model's dtype.

    `states` [layers, max_running + 1, heads, key_dim, value_dim]: by pool row, after all committed tokens but the last,
    as the KV. `checkpoints` [layers, num_pages + 1, ...]: the state after the last token of each KV page, so that a
    prefix hit finds it and that it is shared, evicted and freed with its page. Unwritten and freed ones are poisoned
    when the engine poisons.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        self.page_size = config.page_size
        self._poisons = config.poison
        dtype = torch.promote_types(config.torch_dtype, torch.float32)
        layers, size = len(model.recurrent_layers), model.recurrent_state_size
        fill = POISON if config.poison else 0.0
        self.states = torch.full((layers, config.max_running + 1, *size), fill, dtype=dtype, device=config.device)
        self.checkpoints = torch.full((layers, config.total_pages + 1, *size), fill, dtype=dtype, device=config.device)

    def prefill(
        self, rows: torch.Tensor, block_table: torch.Tensor, starts: torch.Tensor, new: torch.Tensor
    ) -> RecurrentPass:
        """A pass over the prompt tokens from `starts` [N] on. `new` [N]: the request's first chunk, which starts from
        nothing or, behind a prefix hit, from the checkpoint of the last page that was found."""
        page, _ = places(block_table, (starts - 1).clamp(min=0)[:, None], self.page_size)
        found = torch.where((starts > 0)[:, None, None, None], self.checkpoints[:, page[:, 0]], 0.0)
        return RecurrentPass(torch.where(new[:, None, None, None], found, self.states[:, rows]))

    def verify(self, rows: torch.Tensor, parents: torch.Tensor | None) -> RecurrentPass:
        """A pass over verify windows: the last committed token and its drafts. `parents` [N, n - 1], for trees: window
        node that each draft hangs on."""
        if parents is not None:
            parents = torch.cat([torch.full_like(parents[:, :1], -1), parents.clamp(min=0)], dim=1)
        return RecurrentPass(self.states[:, rows], parents)

    def settle(
        self,
        done: RecurrentPass,
        rows: torch.Tensor,
        block_table: torch.Tensor,
        starts: torch.Tensor,
        path: torch.Tensor,
        lens: torch.Tensor,
    ) -> None:
        """Keep what counts of a pass: for the i-th of `rows` [n], the first lens[i] >= 1 tokens of path[i] ([n, w]
        indices into the pass). They stand at positions starts[i], starts[i] + 1, ... Padding behind the n-th request
        of the pass is dropped."""
        requests = torch.arange(len(rows), device=rows.device)
        offsets = torch.arange(path.shape[1], device=rows.device)
        path = path.clamp(min=0)
        last = path.gather(1, (lens - 1)[:, None])[:, 0]
        positions = starts[:, None] + offsets
        ends_page = (offsets < lens[:, None]) & ((positions + 1) % self.page_size == 0)
        pages, _ = places(block_table, torch.where(ends_page, positions, 0), self.page_size)
        pages = torch.where(ends_page, pages, NULL_PAGE)
        for layer, after in enumerate(done.after):
            self.states[layer, rows] = after[requests, last]
            self.checkpoints[layer, pages] = after[requests[:, None], path]

    def release(self, row: int) -> None:
        """A request gives its pool row back."""
        if self._poisons:
            self.states[:, row] = POISON

    def poison(self, pages: Iterable[int]) -> None:
        index = torch.tensor(sorted(pages), dtype=torch.long, device=self.checkpoints.device)
        self.checkpoints[:, index] = POISON
