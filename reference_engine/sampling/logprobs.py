"""Raw log probabilities of chosen tokens, with ranks and the n best."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.base import Backend
from kernels.logprob_rank import logprob_rank
from kernels.topn_gather import topn_gather
from reference_engine.request import Logprob


@dataclass(slots=True)
class LogprobTensors:
    """Rows [N, w] for chosen tokens: ids, logprobs (nats), 1-based ranks; the n best [N, w, n]."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def rows(self, row: int, count: int, num_top: int) -> list[Logprob]:
        """The first `count` entries of one row, with `num_top` best each."""
        chosen = zip(
            self.token_ids[row, :count].tolist(),
            self.logprobs[row, :count].tolist(),
            self.ranks[row, :count].tolist(),
            self.top_ids[row, :count, :num_top].tolist(),
            self.top_logprobs[row, :count, :num_top].tolist(),
            strict=True,
        )
        return [Logprob(i, lp, rank, tuple(zip(ids, lps, strict=True))) for i, lp, rank, ids, lps in chosen]


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, backend: Backend = "torch"
) -> LogprobTensors:
    """Raw logits [N, w, V], chosen ids [N, w] (negative = unused) -> logprobs. A rank is 1 + the number of tokens that
    are strictly more probable."""
    chosen, ranks = logprob_rank(logits, token_ids, backend=backend)
    top_ids, top_logprobs = topn_gather(logits, num_top, backend=backend)
    return LogprobTensors(token_ids, chosen, ranks, top_ids, top_logprobs)
