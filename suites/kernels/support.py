"""What the kernel tests draw their examples with."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

examples = settings(
    max_examples=20, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
"""The same few dozen in every run: an interpreted program takes milliseconds. No deadline: the machine may be busy."""

batches = st.integers(0, 8)
seeds = st.integers(0, 2**31 - 1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def strided(tensor: torch.Tensor, extra: int) -> torch.Tensor:
    """The same values in rows that lie `extra` elements further apart (0 = as they are)."""
    if extra == 0:
        return tensor
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + extra)
    view = wide[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view
