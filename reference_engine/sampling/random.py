"""The one place where random numbers enter. Tests replace `RandomSource` by any object with the same method."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch


class Stream(IntEnum):
    """What a number is for; each use of one (seed, position) draws from a stream of its own. SIBLING + i is the coin
    of the i-th child of a tree node."""

    FINAL = 0
    DRAFT = 1
    SIBLING = 16


class RandomSource(Protocol):
    def uniform(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        """Numbers in [0, 1), float64, of the broadcast shape of `seeds` and `positions` (int64).

        `positions` is the position, in the sequence, of the token that the number decides about.
        """
        ...


class CounterRandom:
    """Counter-based: a number depends on (seed, position, stream) alone, so it is the same alone, in a batch, after a
    preemption and again. SplitMix64 finaliser (Steele, Lea, Flood 2014), 52 bits."""

    def uniform(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        x = _mix(_mix(seeds + _signed(0x9E3779B97F4A7C15)) + positions * 256 + stream)
        return _shift(x, 12).double() * 2.0**-52


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)
