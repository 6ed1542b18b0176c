"""How long a stage of training takes, and what it reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.trained.text import window


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`steps` of `batch` windows of `length` ids. The learning rate rises to `peak_rate` over the first tenth of the
    steps and falls along half a cosine."""

    seed: int
    steps: int
    batch: int
    length: int
    peak_rate: float

    def rate(self, step: int) -> float:
        rise = min(1.0, (step + 1) / (self.steps / 10))
        return self.peak_rate * rise * (1 + math.cos(math.pi * step / self.steps)) / 2

    def windows(self, step: int) -> Tensor:
        """Token ids [batch, length] of a step."""
        first = step * self.batch
        return torch.tensor([window(self.seed, first + row, self.length) for row in range(self.batch)])


TARGET = Plan(seed=1, steps=160, batch=12, length=129, peak_rate=0.02)
DRAFTERS = Plan(seed=2, steps=160, batch=8, length=97, peak_rate=0.06)
FURTHER = {"eagle3": Plan(seed=3, steps=800, batch=8, length=129, peak_rate=0.04)}
"""Drafters that go on alone behind the stage of all, half on what the target itself says: the one that is timed."""
