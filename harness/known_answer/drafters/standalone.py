"""STANDALONE: the drafter is a whole model of its own, with the vocabulary of the target."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from harness.known_answer.base import Drafter, Target
from harness.known_answer.census import CensusTarget, erring_meaning
from harness.known_answer.drafters.pairs import impostor
from harness.known_answer.markov import MarkovTarget


class StandaloneDrafter(Drafter):
    """Drafts what `model`, itself a known-answer model, would generate."""

    method = "STANDALONE"

    def __init__(self, target: Target, model: Target) -> None:
        self.target, self.model = target, model
        self.config, self.weights = model.config, model.weights

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        return self.model.greedy(tokens, k)


def markov(target: MarkovTarget, errs_on: Collection[int] = (), noise: float = 0.0, seed: int = 1) -> StandaloneDrafter:
    """A one-layer Markov model with the target's law, except after a token in `errs_on`, where it has the law of
    another token. `noise` (nats, standard deviation) makes its law differ everywhere."""
    size = target.vocab_size
    columns = [impostor(target, token) if token in errs_on else token for token in range(size)]
    generator = torch.Generator().manual_seed(seed)
    jitter = noise * torch.randn(size, size, dtype=torch.float64, generator=generator)
    law = (target.law[:, columns] + jitter).log_softmax(0)
    model = MarkovTarget(law, eos_token_id=target.eos_token_id, dtype=target.dtype, num_layers=1, seed=seed)
    return StandaloneDrafter(target, model)


def census(target: CensusTarget, errs_on: Collection[int] = ()) -> StandaloneDrafter:
    """A one-layer census model of its own, which takes a token in `errs_on` for another one."""
    return StandaloneDrafter(target, target.variant(erring_meaning(target.alphabets, errs_on)))
