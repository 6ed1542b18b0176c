"""From raw logits to the law that a request asked for.

Order: penalties, logit bias, minimum length, temperature, top-k, top-p, min-p (that of Hugging Face). Every function
returns new tensors: the raw logits stay as they are for logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reference_engine.request import RequestState


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of a batch as columns [N, 1, 1]; None where no request of the batch uses them."""

    greedy: torch.Tensor | None
    temperature: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    repetition: torch.Tensor | None
    presence: torch.Tensor | None
    frequency: torch.Tensor | None
    bias: torch.Tensor | None
    min_new_tokens: torch.Tensor | None
    stop_mask: torch.Tensor | None
    seeds: torch.Tensor

    @property
    def all_greedy(self) -> bool:
        return self.temperature is None

    @classmethod
    def of(
        cls, requests: Sequence[RequestState], size: int, vocab: int, eos: Sequence[int], device: torch.device
    ) -> SamplingBatch:
        """Columns for `requests`, padded with greedy rows to `size`."""
        params = [request.sampling for request in requests]
        pad = size - len(params)

        def column(name: str, off: float, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
            values = [getattr(p, name) for p in params]
            if all(value == off for value in values):
                return None
            return torch.tensor(values + [off] * pad, dtype=dtype, device=device)[:, None, None]

        temperature = column("temperature", 0.0)
        bias = stop_mask = None
        if any(p.logit_bias for p in params):
            bias = torch.zeros(size, 1, vocab, device=device)
            for row, p in enumerate(params):
                for token, value in p.logit_bias:
                    bias[row, 0, token] += value
        min_new_tokens = column("min_new_tokens", 0, torch.long)
        if min_new_tokens is not None:
            stop_mask = torch.zeros(size, 1, vocab, dtype=torch.bool, device=device)
            for row, p in enumerate(params):
                stop_mask[row, 0, [*p.stop_token_ids, *eos]] = True
        return cls(
            greedy=None if temperature is None else temperature == 0,
            temperature=temperature,
            top_k=column("top_k", 0, torch.long),
            top_p=column("top_p", 1.0),
            min_p=column("min_p", 0.0),
            repetition=column("repetition_penalty", 1.0),
            presence=column("presence_penalty", 0.0),
            frequency=column("frequency_penalty", 0.0),
            bias=bias,
            min_new_tokens=min_new_tokens,
            stop_mask=stop_mask,
            seeds=torch.tensor([r.seed for r in requests] + [0] * pad, device=device)[:, None],
        )

    @property
    def penalised(self) -> bool:
        return any(column is not None for column in (self.repetition, self.presence, self.frequency))


@dataclass(slots=True)
class History:
    """What each row of logits [N, Q, V] follows: counts of prompt tokens and of output tokens, drafts on the way to
    the row included; `num_output` [N, Q] output tokens before the row."""

    prompt_counts: torch.Tensor
    output_counts: torch.Tensor
    num_output: torch.Tensor


def adjust_logits(logits: torch.Tensor, batch: SamplingBatch, history: History | None) -> torch.Tensor:
    """Penalties, bias and minimum length on raw logits [N, Q, V]. `history` may be None when nothing needs it."""
    if batch.penalised:
        assert history is not None
        seen = (history.prompt_counts + history.output_counts) > 0
        if batch.repetition is not None:
            scaled = torch.where(logits > 0, logits / batch.repetition, logits * batch.repetition)
            logits = torch.where(seen, scaled, logits)
        if batch.frequency is not None:
            logits = logits - batch.frequency * history.output_counts
        if batch.presence is not None:
            logits = logits - batch.presence * (history.output_counts > 0)
    if batch.bias is not None:
        logits = logits + batch.bias
    if batch.min_new_tokens is not None:
        assert history is not None
        assert batch.stop_mask is not None
        early = history.num_output[:, :, None] < batch.min_new_tokens
        logits = logits.masked_fill(early & batch.stop_mask, float("-inf"))
    return logits


def probabilities(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Adjusted logits [N, Q, V] -> the law to sample from; greedy rows are one-hot at the argmax."""
    best = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if batch.temperature is None or batch.greedy is None:
        return best
    logits = heated(logits, torch.where(batch.greedy, 1.0, batch.temperature))
    if batch.top_k is not None:
        logits = _top_k(logits, batch.top_k)
    if batch.top_p is not None:
        logits = _top_p(logits, batch.top_p)
    probs = logits.softmax(-1)
    if batch.min_p is not None:
        probs = torch.where(probs >= batch.min_p * probs.amax(-1, keepdim=True), probs, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return torch.where(batch.greedy, best, probs)


def heated(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Logits over the temperature, the best of each row at 0: then no temperature, however low, can overflow."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def _top_k(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keep the k largest; ties with the k-th stay in."""
    vocab = logits.shape[-1]
    k = torch.where(top_k == 0, vocab, top_k).clamp(max=vocab)
    kth = logits.sort(-1, descending=True).values.gather(-1, (k - 1).expand(*logits.shape[:-1], 1))
    return logits.masked_fill(logits < kth, float("-inf"))


def _top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches top_p: a token stays while the mass before it
    is below top_p."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    values = values.masked_fill((before >= top_p) & (top_p < 1), float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, values)


def sample(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse CDF: probs [..., V] (need not sum to 1), uniform [...] in [0, 1) -> ids [...]. Ids of probability zero
    cannot come out."""
    mass = probs.double().cumsum(-1)
    return (mass <= uniform[..., None] * mass[..., -1:]).sum(-1).clamp(max=probs.shape[-1] - 1)
