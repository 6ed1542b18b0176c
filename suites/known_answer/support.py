"""Helpers of the known-answer suite."""

from __future__ import annotations

import torch

from harness.known_answer import Drafter
from harness.known_answer.dense_drafters import DenseDrafter, dense_drafter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def dense(drafter: Drafter, dtype: torch.dtype = torch.float64) -> DenseDrafter:
    """The dense forward pass of a drafter that reads hidden rows."""
    target = drafter.target.config, drafter.target.weights
    return dense_drafter(drafter.config, drafter.weights, target, dtype)
