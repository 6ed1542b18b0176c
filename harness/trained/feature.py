"""What the drafters that read the target's states have in common, and how they are trained.

Row p joins the target's feature at p with the token after p. A draft step feeds its own output back as the feature of
the next one, so training unrolls as many steps as are drafted: each row drafts a continuation of its own, which sees
the first step's rows up to itself and its own later rows, as in an engine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.known_answer.base import Config, Weights
from harness.trained.layers import KeysValues
from harness.trained.target import Lesson, Llama

NUM_STEPS = 3
"""Draft steps that training unrolls."""


def distance(logits: Tensor, taught: Tensor) -> Tensor:
    """Mean cross entropy (nats) of a drafter's law against the target's, both [B, T, V] logits."""
    return F.cross_entropy(logits.flatten(0, 1), taught.flatten(0, 1).softmax(-1))


class FeatureDrafter(nn.Module):
    """Subclasses define `features`, `step`, `logits`, and what their checkpoint holds."""

    method: str

    def __init__(self, target: Llama) -> None:
        super().__init__()
        embeddings = target.model.embed_tokens.weight.detach().clone()
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings)  # type: ignore[no-untyped-call]  # torch's
        self.register_buffer("target_head", target.lm_head.weight.detach().clone(), persistent=False)

    def features(self, lesson: Lesson) -> Tensor:
        """Feature rows [B, T, hidden] of the target's states."""
        return lesson.hidden

    @abstractmethod
    def step(self, embeddings: Tensor, features: Tensor, positions: Tensor, past: list[KeysValues]) -> Tensor:
        """Embeddings and features [B, T, hidden] of one draft step -> the rows that are fed back."""

    def logits(self, rows: Tensor) -> Tensor:
        """Over the drafter's vocabulary."""
        return F.linear(rows, self.get_buffer("target_head"))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the drafter's vocabulary -> ids of the target's."""
        return draft_ids

    def law(self, logits: Tensor) -> Tensor:
        """The target's logits [B, T, V] -> those of the drafter's vocabulary."""
        return logits

    @abstractmethod
    def config(self) -> Config: ...

    def tensors(self) -> Weights:
        return dict(self.state_dict())

    def unroll(self, lesson: Lesson, num_steps: int, *, forced: bool) -> Iterator[Tensor]:
        """Logits [B, rows, V_d] of each draft step. Forced steps are fed the ids of the lesson, so that its last
        `num_steps` ids start no draft; others are fed what was drafted."""
        ids, features, past = lesson.ids, self.features(lesson), list[KeysValues]()
        rows = ids.shape[1] - (num_steps if forced else 1)
        tokens, features = ids[:, 1 : 1 + rows], features[:, :rows]
        for step in range(num_steps):
            features = self.step(self.embed_tokens(tokens), features, torch.arange(rows) + step, past)
            logits = self.logits(features)
            yield logits
            tokens = ids[:, step + 2 : step + 2 + rows] if forced else self.target_ids(logits.argmax(-1))

    def loss(self, lesson: Lesson) -> Tensor:
        """Mean over the draft steps of the distance from what the target says at the same place."""
        parts = [
            distance(logits, self.law(lesson.logits[:, step + 1 : step + 1 + logits.shape[1]]))
            for step, logits in enumerate(self.unroll(lesson, NUM_STEPS, forced=True))
        ]
        return torch.stack(parts).mean()

    @torch.no_grad()
    def drafts(self, lesson: Lesson, k: int) -> Tensor:
        """Greedy chains [B, T - 1, k] in target ids: row p drafts what follows ids 0..p + 1."""
        steps = self.unroll(lesson, k, forced=False)
        return torch.stack([self.target_ids(logits.argmax(-1)) for logits in steps], dim=-1)
