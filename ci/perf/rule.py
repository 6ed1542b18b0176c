"""The statistical rule of the gate.

The time of a source in a block is the sum over the slices of its work of the lower quartile over the pairs: what others
on the machine cost makes slices longer, never shorter. The value of a block is log(head / base). If both are the same
source, its sign is a fair coin whatever the noise, since coins decided which is which. Wilcoxon's signed-rank test of
the blocks' values is then exact, not approximate, and holds under drift and autocorrelation. What alarms in the first
blocks is measured again, alone and in more blocks, and must alarm once more in the same direction: the levels multiply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from ci.perf.timed import Block, Side

Floats = npt.NDArray[np.float64]
Clock = Literal["cpu", "wall"]
QUANTILE = 0.25
"""Of the times of a slice. With 18 processes on two cores and 24 pairs a block has 1.0 to 1.6 % of noise, where the
median of the pairs' ratios has 1.2 to 2.5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`false_alarms`: of a whole gate run, at most; half of what is promised, so that a simulation can show that the
    promise is kept. `smallest`: an effect (log ratio) below it never fails."""

    screen_blocks: int = 16
    confirm_blocks: int = 32
    pairs: int = 24
    screen_level: float = 0.02
    false_alarms: float = 0.0005
    smallest: float = 0.01

    def confirm_level(self, benchmarks: int) -> float:
        """One-sided: an alarm needs both, in the same direction, and any of the benchmarks may raise it."""
        return min(0.5, self.false_alarms / (self.screen_level * max(benchmarks, 1)))

    def suspects(self, values: Floats) -> npt.NDArray[np.int64]:
        """[..., screen_blocks] -> 1 where slower, -1 where faster, 0 where nothing is seen."""
        return _direction(values, self.screen_level / 2, self.smallest)

    def confirmed(self, values: Floats, benchmarks: int) -> npt.NDArray[np.int64]:
        """[..., confirm_blocks] -> the same, at the level of the second look."""
        return _direction(values, self.confirm_level(benchmarks), self.smallest)


def values_of(blocks: Sequence[Block], name: str, clock: Clock = "cpu") -> Floats:
    """The value of each block for one benchmark: log(head / base)."""
    return np.log(seconds(blocks, name, "head", clock) / seconds(blocks, name, "base", clock))


def seconds(blocks: Sequence[Block], name: str, side: Side, clock: Clock = "cpu") -> Floats:
    """What one benchmark takes on one side in each block. Raises ValueError when its slices are not the same each time:
    then a slice cannot be held against itself."""
    taken = [[getattr(pair, f"{side}_{clock}") for pair in block.pairs[name]] for block in blocks]
    if len({len(slices) for pairs in taken for slices in pairs}) > 1:
        raise ValueError(f"{name}: does its work in more slices one time than another on {side}; give it fixed ones")
    return np.array([np.quantile(pairs, QUANTILE, axis=0).sum() for pairs in taken])


def _direction(values: Floats, level: float, smallest: float) -> npt.NDArray[np.int64]:
    slower, faster = signed_rank(values) <= level, signed_rank(-values) <= level
    size = np.zeros(slower.shape)
    # The estimate is dear, and few need it.
    size[slower | faster] = effect(values[slower | faster])
    return np.where(slower & (size >= smallest), 1, 0) - np.where(faster & (size <= -smallest), 1, 0)


def effect(values: Floats) -> Floats:
    """Hodges and Lehmann's estimate: the median of all means of two values, along the last axis."""
    first, second = np.triu_indices(values.shape[-1])
    return np.asarray(np.median((values[..., first] + values[..., second]) / 2, axis=-1))


def signed_rank(values: Floats) -> Floats:
    """Probability, along the last axis, of ranks that speak as much for positive values, when signs are fair coins.
    Exact without ties; ties and zeros make it larger."""
    ranks = rankdata(np.abs(values), axis=-1)
    total = np.floor((ranks * (values > 0)).sum(axis=-1)).astype(np.int64)
    return np.asarray(_tail(values.shape[-1])[total])


@cache
def _tail(count: int) -> Floats:
    """P(W >= w) for w = 0 .. count * (count + 1) / 2."""
    ways = np.ones(1)
    for rank in range(1, count + 1):
        ways = np.convolve(ways, np.bincount([0, rank], minlength=rank + 1))
    return np.asarray(np.cumsum(ways[::-1])[::-1] / 2.0**count)


def ratios(blocks: Sequence[Block], control: str) -> Mapping[str, float]:
    """Time of each benchmark of head as a ratio to the control's: the median over all blocks."""
    medians = {name: float(np.median(seconds(blocks, name, "head"))) for name in blocks[0].pairs}
    return {name: round(value / medians[control], 3) for name, value in medians.items() if name != control}
