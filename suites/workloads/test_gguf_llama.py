"""Rows of q and k between the two rotary layouts, against the definition of each rotation."""

from __future__ import annotations

import torch

from harness.workloads.gguf_llama import _rotate_half_rows
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

HEADS, DIM, HIDDEN = 3, 8, 5


def rotate_neighbours(rows: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """[heads, dim]: rows 2i and 2i + 1 of a head turn together by angle i."""
    even, odd = rows[:, 0::2], rows[:, 1::2]
    turned = torch.stack([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], dim=-1)
    return turned.flatten(1)


def rotate_halves(rows: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """[heads, dim]: rows i and i + dim / 2 of a head turn together by angle i."""
    low, high = rows.chunk(2, dim=1)
    return torch.cat([low * angles.cos() - high * angles.sin(), low * angles.sin() + high * angles.cos()], dim=1)


def test_attention_scores_are_the_same_in_both_layouts() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, HEADS * DIM, HIDDEN, dtype=torch.float64, generator=generator)
    x, y = torch.randn(2, HIDDEN, dtype=torch.float64, generator=generator)
    near, far = torch.rand(2, DIM // 2, dtype=torch.float64, generator=generator)
    stored = rotate_neighbours((query @ x).view(HEADS, DIM), near) * rotate_neighbours((key @ y).view(HEADS, DIM), far)
    converted = rotate_halves((_rotate_half_rows(query, HEADS) @ x).view(HEADS, DIM), near) * rotate_halves(
        (_rotate_half_rows(key, HEADS) @ y).view(HEADS, DIM), far
    )
    torch.testing.assert_close(converted.sum(1), stored.sum(1))
    unconverted = rotate_halves((query @ x).view(HEADS, DIM), near) * rotate_halves((key @ y).view(HEADS, DIM), far)
    assert not torch.allclose(unconverted.sum(1), stored.sum(1))
