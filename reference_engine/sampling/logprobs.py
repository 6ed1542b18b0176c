"""Raw log probabilities of chosen tokens, with ranks and the n best."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Raw logits [N, w, V], chosen ids [N, w] (negative = unused) -> logprobs. A rank is 1 + the number of tokens that
    are strictly more probable."""
    logprobs = logits.log_softmax(-1)
    index = token_ids.clamp(min=0)[..., None]
    chosen = logprobs.gather(-1, index)
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    ranks = (logits > logits.gather(-1, index)).sum(-1) + 1
    return LogprobTensors(token_ids, chosen[..., 0], ranks, top.indices, top.values)
