"""From raw logits to the contract's logprob rows, for adapters whose engine hands out logits."""

from __future__ import annotations

import torch

from harness.contract import LogprobRow


def logprob_row(logits: torch.Tensor, token_id: int, num_top: int) -> LogprobRow:
    """The row of `token_id` under raw `logits` [V] of any float dtype; computed in float64, in nats.

    `num_top` best tokens are listed beside it, the lower id first where probabilities are equal.
    """
    values = logits.detach().to("cpu", torch.float64)
    logprobs = values - values.logsumexp(dim=-1)
    rank = 1 + int((values > values[token_id]).sum())
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        order = values.sort(descending=True, stable=True).indices[:num_top].tolist()
        top = tuple((token, float(logprobs[token])) for token in order)
    return LogprobRow(token_id, float(logprobs[token_id]), rank, top)
