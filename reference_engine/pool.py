"""Device-side state of running requests, one row each. What the next step reads is here, never on the host: this is
what lets overlap scheduling launch step n+1 before the results of step n are looked at."""

from __future__ import annotations

import torch

from reference_engine.cache.recurrent import RecurrentCache
from reference_engine.config import EngineConfig
from reference_engine.request import RequestState

PLACEHOLDER = -1


class RequestPool:
    """`max_running` rows and one more, `pad_row`, for padded batch buckets.

    token_ids [R, W] int64: prompt and committed tokens; seq_lens [R]: how many; block_table [R, pages] int64, 0 = null
    page; draft_tokens [R, num_draft_tokens - 1], PLACEHOLDER = no draft; draft_parents likewise: node index (0 = root)
    of each draft's parent; draft_probs [R, k, V] float32 or None: what sampled drafts were drawn from. `recurrent`: the
    states of the same rows, for a target that has recurrent layers.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, recurrent: RecurrentCache | None = None) -> None:
        device = torch.device(config.device)
        rows = config.max_running + 1
        width = config.max_pages_per_request * config.page_size
        num_drafts = config.num_draft_tokens - 1
        self.pad_row = config.max_running
        self.token_ids = torch.zeros(rows, width, dtype=torch.long, device=device)
        self.seq_lens = torch.ones(rows, dtype=torch.long, device=device)
        self.prompt_lens = torch.ones(rows, dtype=torch.long, device=device)
        self.block_table = torch.zeros(rows, config.max_pages_per_request, dtype=torch.long, device=device)
        self.draft_tokens = torch.full((rows, num_drafts), PLACEHOLDER, dtype=torch.long, device=device)
        self.draft_parents = torch.arange(num_drafts, device=device).repeat(rows, 1)
        probabilistic = config.spec is not None and config.spec.draft_sample_method == "probabilistic"
        self.draft_probs = torch.zeros(rows, num_drafts, vocab_size, device=device) if probabilistic else None
        self.recurrent = recurrent
        self._free_rows = list(range(config.max_running - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def admit(self, request: RequestState) -> None:
        """Take a row and write the committed tokens into it. Nothing of the row's last tenant is left."""
        row = request.row = self._free_rows.pop()
        tokens = torch.tensor(request.token_ids, device=self.token_ids.device)
        self.token_ids[row] = 0
        self.token_ids[row, : len(tokens)] = tokens
        self.seq_lens[row] = len(tokens)
        self.prompt_lens[row] = len(request.prompt_token_ids)
        self.block_table[row] = 0
        self.draft_tokens[row] = PLACEHOLDER
        if self.draft_probs is not None:
            self.draft_probs[row] = 0.0

    def set_pages(self, request: RequestState) -> None:
        pages = torch.tensor(request.pages, device=self.block_table.device)
        self.block_table[request.row, : len(pages)] = pages

    def release(self, request: RequestState) -> None:
        self.block_table[request.row] = 0
        if self.recurrent is not None:
            self.recurrent.release(request.row)
        self._free_rows.append(request.row)
        request.row = -1

    def commit(self, rows: torch.Tensor, emitted: torch.Tensor, counts: torch.Tensor) -> None:
        """Append emitted [N, w] (its first counts[n] ids) to the rows [N]."""
        offsets = torch.arange(emitted.shape[1], device=rows.device)
        columns = self.seq_lens.index_select(0, rows)[:, None] + offsets
        self.token_ids[rows[:, None], columns] = emitted.masked_fill(offsets >= counts[:, None], 0)
        self.seq_lens.index_add_(0, rows, counts)
