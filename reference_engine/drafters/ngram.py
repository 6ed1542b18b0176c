"""NGRAM: prompt lookup (Saxena 2023). Drafts are what followed the last tokens when they came up before; no model.

Semantics of vLLM's `ngram` (transformers' prompt lookup is the same with prompt_lookup_min=1): of the n-grams that end
the committed tokens, the longest with prompt_lookup_min <= n <= prompt_lookup_max that occurs earlier counts, and of
its occurrences, which may overlap the end, the first. Up to k tokens that followed it are drafted, none past the end.
"""

from __future__ import annotations

import torch

from reference_engine.config import EngineConfig, require
from reference_engine.drafters.base import Drafter, Proposal, ProposeInputs
from reference_engine.model.causal_lm import CausalLM
from reference_engine.pool import PLACEHOLDER
from reference_engine.sampling.random import RandomSource


class NgramDrafter(Drafter):
    """Looks the drafts up in the committed tokens on the device, so that nothing waits for the host."""

    def __init__(self, config: EngineConfig, target: CausalLM, random: RandomSource, num_positions: int) -> None:
        del target, random, num_positions
        spec = config.spec
        assert spec is not None
        require(spec.model is None, "model", str(spec.model), "NGRAM has no checkpoint; leave it out")
        require(spec.topk == 1, "topk", spec.topk, "NGRAM drafts chains only; use topk=1")
        method = "a lookup draws from no law that verification could weigh; NGRAM must use 'greedy'"
        require(spec.draft_sample_method == "greedy", "draft_sample_method", spec.draft_sample_method, method)
        self.spec = spec

    def propose(self, inputs: ProposeInputs) -> Proposal:
        spec, history = self.spec, inputs.history[inputs.rows]
        window = (spec.prompt_lookup_min, spec.prompt_lookup_max)
        drafts = look_up(history, inputs.seq_lens, *window, inputs.num_drafts)
        return Proposal(drafts.masked_fill(inputs.discard[:, None], PLACEHOLDER))


def look_up(tokens: torch.Tensor, seq_lens: torch.Tensor, shortest: int, longest: int, num_drafts: int) -> torch.Tensor:
    """tokens [N, W] int64, of which seq_lens [N] count -> drafts [N, num_drafts], PLACEHOLDER where there are none."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    last = seq_lens[:, None] - 1
    # How many tokens up to each place are those that end the row.
    same = places < last
    lengths = torch.zeros_like(tokens)
    for back in range(longest):
        earlier = tokens[:, (places - back).clamp(min=0)]
        same = same & (places >= back) & (earlier == tokens.gather(1, (last - back).clamp(min=0)))
        lengths += same
    best = lengths.amax(1, keepdim=True)
    first = (lengths == best).long().argmax(1, keepdim=True)
    following = first + 1 + torch.arange(num_drafts, device=tokens.device)
    found = (best >= shortest) & (following <= last)
    return torch.where(found, tokens.gather(1, following.clamp(max=tokens.shape[1] - 1)), PLACEHOLDER)
