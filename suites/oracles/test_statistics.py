"""Statistics: false alarms and power are what they are said to be, by simulation and by exact enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from harness.oracles.statistics import (
    EXACT_LIMIT,
    MIN_EXPECTED,
    Floats,
    goodness_of_fit,
    merge,
    num_outcomes,
    power,
    sample_size,
    share_alpha,
    tally,
    total_variation,
)
from suites.registration import suite

suite(seconds=0.6, stage="cpu", needs="cpu")

LAW = np.array([0.4, 0.3, 0.15, 0.1, 0.05])


def hardest(law: Floats, distance: float) -> Floats:
    """The alternative at this distance that chi-squared sees worst: half of the mass grows in proportion."""
    up = np.array([True, False, False, True, False])
    assert law[up].sum() == pytest.approx(0.5)
    return np.where(up, law * (1 + 2 * distance), law * (1 - 2 * distance))


def test_a_sample_from_the_law_fits_and_an_impossible_outcome_does_not() -> None:
    counts = np.random.default_rng(7).multinomial(4000, LAW)
    fit = goodness_of_fit(counts, LAW)
    assert fit.passed
    assert fit.method == "chi-squared"
    assert "the law fits" in str(fit)
    broken = goodness_of_fit([*counts, 1], [*LAW, 0.0])
    assert not broken.passed
    assert (broken.p_value, broken.method, broken.impossible) == (0.0, "support", (5,))
    assert "impossible outcomes (5,)" in str(broken)


@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_false_alarms_of_chi_squared_come_at_the_stated_rate(alpha: float) -> None:
    rng = np.random.default_rng(11)
    fits = [goodness_of_fit(rng.multinomial(2000, LAW), LAW, alpha=alpha) for _ in range(1000)]
    alarms = sum(not fit.passed for fit in fits)
    assert {fit.method for fit in fits} == {"chi-squared"}
    low, high = stats.binom.interval(1 - 1e-4, 1000, alpha)
    assert low <= alarms <= high


def test_the_exact_test_keeps_its_rate_exactly() -> None:
    """Over all outcomes of 12 draws into 3 bins: the mass of those that fail is at most alpha, and close to it."""
    law = np.array([0.6, 0.3, 0.1])
    mass = 0.0
    for a in range(13):
        for b in range(13 - a):
            counts = [a, b, 12 - a - b]
            fit = goodness_of_fit(counts, law, alpha=0.05)
            assert fit.method == "exact"
            mass += 0.0 if fit.passed else float(stats.multinomial.pmf(counts, 12, law))
    assert 0.03 < mass <= 0.05


def test_the_exact_test_agrees_with_the_binomial_test() -> None:
    for heads in range(11):
        fit = goodness_of_fit([heads, 10 - heads], [0.3, 0.7])
        assert fit.p_value == pytest.approx(stats.binomtest(heads, 10, 0.3).pvalue)


@pytest.mark.parametrize(("distance", "wanted"), [(0.05, 0.99), (0.1, 0.9)])
def test_the_sample_size_gives_the_stated_power_against_the_hardest_alternative(distance: float, wanted: float) -> None:
    size = sample_size(LAW.size, distance, alpha=1e-3, wanted=wanted)
    assert power(size, LAW.size, distance, alpha=1e-3) >= wanted > power(size - 1, LAW.size, distance, alpha=1e-3)
    rng = np.random.default_rng(13)
    other = hardest(LAW, distance)
    assert total_variation(LAW, other) == pytest.approx(distance)
    seen = sum(not goodness_of_fit(rng.multinomial(size, other), LAW, alpha=1e-3).passed for _ in range(1000))
    assert abs(seen / 1000 - wanted) < 0.03


def test_easier_alternatives_are_seen_at_least_as_often() -> None:
    distance, size = 0.05, sample_size(LAW.size, 0.05, alpha=1e-3, wanted=0.9)
    other = LAW + distance * np.array([-1, 0, 0, 0, 1])
    rng = np.random.default_rng(17)
    seen = sum(not goodness_of_fit(rng.multinomial(size, other), LAW, alpha=1e-3).passed for _ in range(500))
    assert seen / 500 > 0.9


def test_the_sample_size_grows_as_it_should() -> None:
    assert sample_size(5, 0.05) > sample_size(5, 0.1) > sample_size(5, 0.1, wanted=0.5)
    assert sample_size(50, 0.1) > sample_size(5, 0.1)
    assert sample_size(5, 0.1, alpha=1e-9) > sample_size(5, 0.1, alpha=1e-3)


def test_rare_bins_are_merged_and_nothing_is_lost() -> None:
    law = np.array([0.9, 0.05, 0.02, 0.01, 0.01, 0.01])
    observed = np.array([90, 5, 2, 1, 1, 1])
    seen, due = merge(observed, law * 100)
    assert (due >= MIN_EXPECTED).all()
    assert (seen.sum(), due.sum()) == (100, pytest.approx(100))
    assert merge(np.array([3, 3, 4]), np.array([3.0, 3.0, 4.0]))[1].tolist() == [10.0]
    assert merge(np.array([1, 1]), np.array([1.0, 1.0]))[0].tolist() == [2]


def test_a_certain_law_fits_a_certain_sample() -> None:
    assert goodness_of_fit([0, 9], [0.0, 1.0]).passed
    assert goodness_of_fit([3], [1.0]).p_value == pytest.approx(1.0)


def test_large_samples_are_not_enumerated() -> None:
    assert num_outcomes(12, 3) == 91
    assert num_outcomes(2000, 5) > EXACT_LIMIT


@pytest.mark.parametrize(
    ("counts", "law", "says"),
    [
        ([1, 2], [1.0], "must both be"),
        ([0, 0], [0.5, 0.5], "at least one sample"),
        ([1.5, 1], [0.5, 0.5], "whole numbers"),
        ([-1, 2], [0.5, 0.5], "not negative"),
        ([1, 2], [0.5, 0.4], "sum to 1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(counts: list[float], law: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        goodness_of_fit(counts, law)


def test_other_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="alpha"):
        goodness_of_fit([1, 2], [0.5, 0.5], alpha=0.0)
    with pytest.raises(ValueError, match="must be at least 2"):
        sample_size(1, 0.1)
    with pytest.raises(ValueError, match="num_tests=0"):
        share_alpha(0.01, 0)
    assert share_alpha(0.01, 100) == pytest.approx(1e-4)


def test_blocks_are_tallied_against_their_joint_law() -> None:
    law: dict[tuple[int, ...], float] = {(0, 1): 0.25, (1, 0): 0.75}
    counts, masses, bins = tally([(1, 0), (1, 0), (2,), (0, 1)], law)
    assert bins == ((0, 1), (1, 0), (2,))
    assert counts.tolist() == [1, 2, 1]
    assert masses.tolist() == [0.25, 0.75, 0.0]
    assert not goodness_of_fit(counts, masses).passed
