"""Does a sample come from a law? Tests with a stated false-alarm rate, and the sample size for a stated power.

`alpha` is the probability of failing a correct engine, per test; `share_alpha` divides it over many tests. The power is
that of Pearson's chi-squared against the alternatives at a given total-variation distance: among them the hardest to
see spreads its excess in proportion to the law, and has noncentrality n * (2 * distance) ** 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Floats: TypeAlias = NDArray[np.float64]

ALPHA = 1e-6
"""False alarms per test: one in a million runs of a correct engine."""

MIN_EXPECTED = 5.0
"""Bins that are expected to hold fewer counts are merged, so that chi-squared is a fair approximation."""

EXACT_LIMIT = 50_000
"""Most outcomes of a multinomial that are enumerated for an exact p-value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The verdict. `p_value` is the probability, under the law, of a sample at least as odd. `impossible` lists the
    bins that the law gives no mass and the sample has: then p is 0, whatever the rest looks like."""

    p_value: float
    alpha: float
    method: Literal["exact", "chi-squared", "support"]
    statistic: float
    degrees: int
    num_samples: int
    impossible: tuple[int, ...] = ()

    @property
    def passed(self) -> bool:
        return self.p_value >= self.alpha

    def __str__(self) -> str:
        verdict = "fits" if self.passed else "does not fit"
        strange = f", impossible outcomes {self.impossible[:8]}" if self.impossible else ""
        return (
            f"{self.num_samples} samples: the law {verdict} (p = {self.p_value:.3g}, alpha = {self.alpha:.3g}, "
            f"{self.method}, statistic {self.statistic:.4g} with {self.degrees} degrees of freedom{strange})"
        )


def goodness_of_fit(counts: ArrayLike, law: ArrayLike, *, alpha: float = ALPHA) -> Fit:
    """Test [bins] counts against [bins] probabilities: exactly when the sample is small enough, else by chi-squared.

    Raises ValueError on other shapes, an empty sample, a law that does not sum to 1 or an alpha outside (0, 1).
    """
    observed, expected = _checked(counts, law, alpha)
    total = int(observed.sum())
    impossible = tuple(np.flatnonzero((expected == 0) & (observed > 0)).tolist())
    if impossible:
        return Fit(
            p_value=0.0,
            alpha=alpha,
            method="support",
            statistic=math.inf,
            degrees=0,
            num_samples=total,
            impossible=impossible,
        )
    possible = expected > 0
    observed, expected = observed[possible], expected[possible] / expected.sum()
    if num_outcomes(total, observed.size) <= EXACT_LIMIT:
        return _exact(observed, expected, alpha)
    return _chi_squared(*merge(observed, expected * total), alpha)


def _checked(counts: ArrayLike, law: ArrayLike, alpha: float) -> tuple[NDArray[np.int64], Floats]:
    observed, expected = np.asarray(counts), np.asarray(law, dtype=np.float64)
    if observed.ndim != 1 or observed.shape != expected.shape:
        raise ValueError(f"counts of shape {observed.shape}, law of shape {expected.shape}: must both be [bins]")
    if (observed < 0).any() or (observed != np.floor(observed)).any() or observed.sum() == 0:
        raise ValueError("counts: must be whole numbers, not negative, and hold at least one sample")
    if (expected < 0).any() or not math.isclose(float(expected.sum()), 1.0, abs_tol=1e-9):
        raise ValueError(f"law sums to {expected.sum()}: must be probabilities that sum to 1")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha}: must lie in (0, 1)")
    return observed.astype(np.int64), expected


def num_outcomes(samples: int, bins: int) -> int:
    """How many different counts `samples` draws into `bins` bins can give."""
    return math.comb(samples + bins - 1, bins - 1)


def _exact(observed: NDArray[np.int64], law: Floats, alpha: float) -> Fit:
    """Exact multinomial test: the mass of all outcomes that are no more probable than the one observed."""
    total, bins = int(observed.sum()), observed.size
    bars = np.array(list(combinations(range(total + bins - 1), bins - 1)), dtype=np.int64).reshape(
        num_outcomes(total, bins), bins - 1
    )
    ends = np.ones((len(bars), 1), dtype=np.int64)
    edges = np.concatenate([-ends, bars, ends * (total + bins - 1)], axis=1)
    outcomes = np.diff(edges, axis=1) - 1
    log_masses = _log_mass(outcomes, law)
    mine = _log_mass(observed[None], law)[0]
    odd = log_masses <= mine + 1e-9  # outcomes of equal mass count, in spite of rounding
    p_value = min(1.0, float(np.exp(special.logsumexp(log_masses[odd]))))
    return Fit(
        p_value=p_value, alpha=alpha, method="exact", statistic=-float(mine), degrees=bins - 1, num_samples=total
    )


def _log_mass(outcomes: NDArray[np.int64], law: Floats) -> Floats:
    total = outcomes.sum(1)
    ways = special.gammaln(total + 1) - special.gammaln(outcomes + 1).sum(1)
    return np.asarray(ways + outcomes @ np.log(law), dtype=np.float64)


def merge(observed: NDArray[np.int64], expected: Floats) -> tuple[Floats, Floats]:
    """Merge the rarest bins until each is expected to hold `MIN_EXPECTED` counts; one bin may be all that is left."""
    order = np.argsort(expected, kind="stable")
    bins: list[tuple[float, float]] = []
    seen, due = 0.0, 0.0
    for index in order:
        seen, due = seen + float(observed[index]), due + float(expected[index])
        if due >= MIN_EXPECTED:
            bins.append((seen, due))
            seen, due = 0.0, 0.0
    if due > 0 and bins:
        bins[-1] = (bins[-1][0] + seen, bins[-1][1] + due)
    elif due > 0:
        bins.append((seen, due))
    merged = np.array(bins, dtype=np.float64)
    return merged[:, 0], merged[:, 1]


def _chi_squared(observed: Floats, expected: Floats, alpha: float) -> Fit:
    degrees = observed.size - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return Fit(
        p_value=float(stats.chi2.sf(statistic, degrees)) if degrees else 1.0,
        alpha=alpha,
        method="chi-squared",
        statistic=statistic,
        degrees=degrees,
        num_samples=int(observed.sum()),
    )


def power(num_samples: int, num_bins: int, distance: float, *, alpha: float = ALPHA) -> float:
    """The least probability of failing an engine whose law is off by `distance` in total variation.

    For chi-squared over `num_bins` bins with positive mass, none of them merged.
    """
    degrees = num_bins - 1
    limit = stats.chi2.isf(alpha, degrees)
    return float(stats.ncx2.sf(limit, degrees, num_samples * (2 * distance) ** 2))


def sample_size(num_bins: int, distance: float, *, alpha: float = ALPHA, wanted: float = 0.99) -> int:
    """The fewest samples with which `power` reaches `wanted`. Raises ValueError on arguments that make no sense."""
    if num_bins < 2 or not 0 < distance <= 1 or not 0 < alpha < wanted < 1:
        raise ValueError(
            f"num_bins={num_bins}, distance={distance}, alpha={alpha}, wanted={wanted}: must be at least 2, in (0, 1], "
            "and 0 < alpha < wanted < 1"
        )
    high = 1
    while power(high, num_bins, distance, alpha=alpha) < wanted:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if power(middle, num_bins, distance, alpha=alpha) < wanted:
            low = middle
        else:
            high = middle
    return high


def share_alpha(alpha: float, num_tests: int) -> float:
    """The rate per test that keeps the rate of any false alarm among `num_tests` below `alpha` (Bonferroni)."""
    if num_tests < 1:
        raise ValueError(f"num_tests={num_tests}: must be at least 1")
    return alpha / num_tests


def total_variation(first: ArrayLike, second: ArrayLike) -> float:
    """Half the summed absolute difference of two laws."""
    return float(np.abs(np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)).sum() / 2)


def tally(
    blocks: Sequence[tuple[int, ...]], law: Mapping[tuple[int, ...], float]
) -> tuple[NDArray[np.int64], Floats, tuple[tuple[int, ...], ...]]:
    """Counts and probabilities of blocks, bin by bin, ready for `goodness_of_fit`; the bins are returned as well.

    Blocks that the law does not know get a bin of probability 0 each.
    """
    bins = (*sorted(law), *sorted(set(blocks) - law.keys()))
    places = {block: place for place, block in enumerate(bins)}
    counts = np.zeros(len(bins), dtype=np.int64)
    for block in blocks:
        counts[places[block]] += 1
    return counts, np.array([law.get(block, 0.0) for block in bins], dtype=np.float64), bins
