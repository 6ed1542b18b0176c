"""Counter-based random numbers: a function of (seed, position, stream), and evenly spread whichever of them moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from reference_engine.sampling.random import CounterRandom, Stream
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

RANDOM = CounterRandom()
FALSE_ALARMS = 1e-6
"""Per test; the numbers do not change from run to run, so a test that has passed once passes always."""

INT64 = st.integers(-(2**63), 2**63 - 1)
POSITION = st.integers(0, 2**40)
STREAM = st.integers(0, 255)


def uniform(seeds: list[int], positions: list[int], stream: int) -> torch.Tensor:
    return RANDOM.uniform(torch.tensor(seeds)[:, None], torch.tensor(positions)[None], stream)


@given(seed=INT64, position=POSITION, stream=STREAM)
def test_numbers_lie_in_the_unit_interval_and_come_again(seed: int, position: int, stream: int) -> None:
    numbers = uniform([seed], [position], stream)
    assert numbers.dtype == torch.float64
    assert 0 <= float(numbers) < 1
    assert torch.equal(numbers, uniform([seed], [position], stream))


@given(
    seeds=st.lists(INT64, min_size=1, max_size=4), positions=st.lists(POSITION, min_size=1, max_size=4), stream=STREAM
)
def test_a_number_does_not_depend_on_its_batch(seeds: list[int], positions: list[int], stream: int) -> None:
    together = uniform(seeds, positions, stream)
    alone = [[float(uniform([seed], [position], stream)) for position in positions] for seed in seeds]
    assert together.tolist() == alone


def test_streams_and_neighbours_differ() -> None:
    """No two of 64 seeds x 64 positions x 8 streams give the same number."""
    streams = [Stream.FINAL, Stream.DRAFT, *(Stream.SIBLING + i for i in range(6))]
    numbers = torch.stack([uniform(list(range(64)), list(range(64)), stream) for stream in streams])
    assert len(set(numbers.flatten().tolist())) == numbers.numel()


LINES = {
    "positions": uniform([12345], list(range(20_000)), Stream.FINAL),
    "seeds": uniform(list(range(20_000)), [7], Stream.FINAL),
    "high seeds": uniform([seed << 32 for seed in range(20_000)], [7], Stream.DRAFT),
    "streams": torch.cat([uniform(list(range(100)), [3], stream) for stream in range(200)], dim=1),
}


@pytest.mark.parametrize("name", LINES)
def test_numbers_are_evenly_spread(name: str) -> None:
    """Kolmogorov-Smirnov against the uniform law, 20 000 numbers. A false alarm would come once in a million."""
    assert stats.kstest(LINES[name].flatten().numpy(), "uniform").pvalue > FALSE_ALARMS


@pytest.mark.parametrize("name", LINES)
def test_neighbours_are_independent(name: str) -> None:
    """Chi-squared over a 10 x 10 table of disjoint pairs of neighbours, 100 expected in each cell."""
    cells = (LINES[name].flatten() * 10).long().view(-1, 2)
    table = torch.bincount(cells[:, 0] * 10 + cells[:, 1], minlength=100)
    assert stats.chisquare(table.numpy()).pvalue > FALSE_ALARMS


def test_the_first_number_does_not_tell_the_other_streams() -> None:
    """Rank correlation between what accepts a draft, what draws it and what replaces it."""
    seeds = list(range(20_000))
    streams = [
        uniform(seeds, [11], stream).flatten().numpy() for stream in (Stream.FINAL, Stream.DRAFT, Stream.SIBLING)
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert stats.spearmanr(streams[one], streams[other]).pvalue > FALSE_ALARMS
