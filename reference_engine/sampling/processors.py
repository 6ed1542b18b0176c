"""From raw logits to the law that a request asked for.

Order: penalties, logit bias, the masks (minimum length, allowed ids, bad words, grammar), temperature, top-k, top-p,
min-p (that of Hugging Face). Every function returns new tensors: the raw logits stay as they are for logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.apply_penalties import apply_penalties
from kernels.base import Backend
from kernels.filter_logits import filter_logits
from kernels.verify_chain_sampled import verify_chain_sampled
from reference_engine.request import RequestState
from reference_engine.sampling.bad_words import BadWords


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of a batch as columns [N, 1, 1]; None where no request of the batch uses them. `backend` says
    what computes with them."""

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
    allowed: torch.Tensor | None
    bad_words: BadWords | None
    seeds: torch.Tensor
    backend: Backend = "torch"

    @property
    def all_greedy(self) -> bool:
        return self.temperature is None

    @classmethod
    def of(
        cls,
        requests: Sequence[RequestState],
        size: int,
        vocab: int,
        eos: Sequence[int],
        device: torch.device,
        backend: Backend = "torch",
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
        bias = stop_mask = allowed = None
        if any(p.logit_bias for p in params):
            bias = torch.zeros(size, 1, vocab, device=device)
            values = torch.tensor([value for p in params for _, value in p.logit_bias], dtype=bias.dtype, device=device)
            named = _places([[token for token, _ in p.logit_bias] for p in params], device)
            bias.index_put_(named, values, accumulate=True)
        min_new_tokens = column("min_new_tokens", 0, torch.long)
        if min_new_tokens is not None:
            stop_mask = torch.zeros(size, 1, vocab, dtype=torch.bool, device=device)
            stop_mask[_places([[*p.stop_token_ids, *eos] for p in params], device)] = True
        if any(p.allowed_token_ids for p in params):
            limited = [bool(p.allowed_token_ids) for p in params] + [False] * pad
            allowed = ~torch.tensor(limited, device=device)[:, None, None].repeat(1, 1, vocab)
            allowed[_places([p.allowed_token_ids for p in params], device)] = True
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
            allowed=allowed,
            bad_words=BadWords.of([p.bad_words for p in params], device),
            seeds=torch.tensor([r.seed for r in requests] + [0] * pad, device=device)[:, None],
            backend=backend,
        )

    @property
    def penalised(self) -> bool:
        return any(column is not None for column in (self.repetition, self.presence, self.frequency))

    @property
    def masks(self) -> bool:
        """Whether a row of logits may lose tokens, and so all of them."""
        return any(x is not None for x in (self.bias, self.min_new_tokens, self.allowed, self.bad_words))


def _places(ids: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids by row -> an index into [N, 1, V] of all of them."""
    rows = [row for row, mine in enumerate(ids) for _ in mine]
    flat = torch.tensor([rows, [0] * len(rows), [token for mine in ids for token in mine]], dtype=torch.long)
    row, none, token = flat.to(device)
    return row, none, token


@dataclass(slots=True)
class History:
    """What each row of logits [N, Q, V] follows: counts of prompt tokens and of output tokens, drafts on the way to
    the row included; `num_output` [N, Q] output tokens before the row; `tails` [N, Q, L]: the last of them, where bad
    words need to know (see `output_tails`)."""

    prompt_counts: torch.Tensor
    output_counts: torch.Tensor
    num_output: torch.Tensor
    tails: torch.Tensor | None = None


def adjust_logits(
    logits: torch.Tensor, batch: SamplingBatch, history: History | None, permitted: torch.Tensor | None = None
) -> torch.Tensor:
    """Penalties, bias and masks on raw logits [N, Q, V]. `history` may be None when nothing needs it; `permitted` bool
    [N, Q, V] is what grammars let follow."""
    if batch.penalised:
        assert history is not None
        counts = (history.prompt_counts.expand_as(logits), history.output_counts.expand_as(logits))
        columns = (flat(column) for column in (batch.repetition, batch.frequency, batch.presence))
        logits = apply_penalties(logits, *counts, *columns, backend=batch.backend)
    if batch.bias is not None:
        logits = logits + batch.bias
    if batch.min_new_tokens is not None:
        assert history is not None
        assert batch.stop_mask is not None
        early = history.num_output[:, :, None] < batch.min_new_tokens
        logits = logits.masked_fill(early & batch.stop_mask, float("-inf"))
    if batch.allowed is not None:
        logits = logits.masked_fill(~batch.allowed, float("-inf"))
    if batch.bad_words is not None:
        assert history is not None
        assert history.tails is not None
        logits = logits.masked_fill(batch.bad_words.banned(history.tails, logits.shape[2]), float("-inf"))
    if permitted is not None:
        logits = logits.masked_fill(~permitted, float("-inf"))
    return logits


def probabilities(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Adjusted logits [N, Q, V] -> the law to sample from; greedy rows are one-hot at the argmax."""
    columns = (flat(column) for column in (batch.temperature, batch.top_k, batch.top_p, batch.min_p))
    return filter_logits(logits, *columns, backend=batch.backend).softmax(-1)


def flat(column: torch.Tensor | None) -> torch.Tensor | None:
    """[N, 1, 1] -> [N]."""
    return None if column is None else column[:, 0, 0]


def heated(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Logits over the temperature, the best of each row at 0: then no temperature, however low, can overflow."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def draw(probs: torch.Tensor, uniform: torch.Tensor, backend: Backend) -> torch.Tensor:
    """Inverse CDF: probs [N, V], uniform [N] in [0, 1) -> ids [N]: verification of a chain without drafts."""
    none = torch.empty(len(probs), 0, dtype=torch.long, device=probs.device)
    coins = (uniform.new_empty(len(probs), 0), uniform[:, None])
    emitted, _ = verify_chain_sampled(none, None, probs[:, None], *coins, backend=backend)
    return emitted[:, 0]
