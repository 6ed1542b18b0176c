"""Evidence: under the law its wealth is worth 1 on average, exactly, so that 1 / alpha is reached with probability
alpha at most; and it grows where the law is missed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from harness.oracles.evidence import STRENGTH, Evidence, Floats, log_wealth
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")

LAW = np.array([0.6, 0.3, 0.1])


def worth(sequence: tuple[int, ...], laws: list[Floats], strength: float = 5.0) -> float:
    evidence = Evidence(strength)
    for place, (law, token) in enumerate(zip(laws, sequence, strict=True)):
        evidence.add(place % 2, law, token)
    assert evidence.num_samples == len(sequence)
    return math.exp(evidence.log_value)


def laws_along(sequence: tuple[int, ...]) -> list[Floats]:
    """A law that forgets nothing: each token that came is half as likely again."""
    laws = []
    for place in range(len(sequence)):
        weights = LAW * 0.5 ** np.bincount(np.array(sequence[:place], dtype=np.int64), minlength=3)
        laws.append(weights / weights.sum())
    return laws


def test_under_the_law_the_wealth_is_1_on_average() -> None:
    """Over all sequences of six tokens, in two contexts, with laws that depend on everything before."""
    total = 0.0
    for sequence in itertools.product(range(3), repeat=6):
        laws = laws_along(sequence)
        chance = math.prod(float(law[token]) for law, token in zip(laws, sequence, strict=True))
        total += chance * worth(sequence, laws)
    assert total == pytest.approx(1.0, abs=1e-12)


def test_the_closed_form_is_what_is_gathered_token_by_token() -> None:
    tokens = np.random.default_rng(1).choice(3, size=400, p=[0.5, 0.3, 0.2])
    evidence = Evidence()
    for token in tokens.tolist():
        evidence.add("here", LAW, token)
    counts = np.bincount(tokens, minlength=3).astype(np.float64)
    assert evidence.log_value == pytest.approx(float(log_wealth(counts, LAW)), abs=1e-9)


@pytest.mark.parametrize("alpha", [0.05, 0.005])
def test_false_alarms_stay_below_the_stated_rate(alpha: float) -> None:
    """20 000 samples of 5000 tokens. More alarms than this come once in a million sessions if the rate is alpha."""
    counts = np.random.default_rng(2).multinomial(5000, LAW, size=20_000).astype(np.float64)
    alarms = int((log_wealth(counts, LAW, strength=60.0) >= -math.log(alpha)).sum())
    assert alarms <= stats.binom.isf(1e-6, 20_000, alpha)


def test_a_token_of_probability_zero_is_infinite_evidence() -> None:
    for token in (2, 3, -1):
        evidence = Evidence()
        evidence.add("a", np.array([0.5, 0.5, 0.0]), 0)
        evidence.add("b", np.array([0.5, 0.5, 0.0]), token)
        evidence.add("b", np.array([0.5, 0.5, 0.0]), 1)
        assert evidence.log_value == math.inf
        assert evidence.describe() == "in the context b a token came that the law gives no mass"


def test_it_grows_where_the_law_is_missed_and_says_where() -> None:
    rng = np.random.default_rng(3)
    evidence = Evidence(strength=50.0)
    for context, law in (("right", LAW), ("wrong", np.array([0.4, 0.5, 0.1]))):
        for token in rng.choice(3, size=2000, p=law).tolist():
            evidence.add(context, LAW, token)
    assert evidence.log_value > 100
    assert evidence.describe().startswith("in the context wrong token 1 came")


def test_strength_must_be_positive() -> None:
    assert Evidence().strength == STRENGTH
    with pytest.raises(ValueError, match="strength=0"):
        Evidence(0)
