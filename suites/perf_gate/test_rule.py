"""The statistical rule: its level is exact, its power is what simulation says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import wilcoxon

from ci.perf import power
from ci.perf.rule import Floats, Rule, effect, signed_rank, values_of
from ci.perf.timed import Block, Pair
from suites.registration import suite

suite(seconds=1.8, stage="cpu", needs="cpu")

RULE = Rule()
BENCHMARKS = 6


def recorded(noise: float, blocks: int = 200, *, drift: float = 0.0, heavy: bool = False) -> Floats:
    """Values of blocks [blocks, BENCHMARKS]: noise that all share, in part, and that comes in waves."""
    rng = np.random.default_rng(0)
    own = rng.standard_t(2, (blocks, BENCHMARKS)) if heavy else rng.standard_normal((blocks, BENCHMARKS))
    shared = drift * np.sin(np.arange(blocks) / 9)[:, None]
    return np.asarray(noise * (own + shared))


def block(base: list[list[float]], head: list[list[float]]) -> Block:
    """One benchmark, "a": the times of its slices, pair by pair."""
    return Block(pairs={"a": [Pair(one, other, one, other) for one, other in zip(base, head, strict=True)]})


def test_a_value_is_the_ratio_of_what_all_slices_take() -> None:
    """One of three slices, half of the time, takes 10 % longer."""
    (value,) = values_of([block([[1.0, 1.0, 2.0]] * 4, [[1.0, 1.0, 2.2]] * 4)], "a")
    assert value == pytest.approx(np.log(1.05))


def test_a_value_is_deaf_to_what_disturbs_single_slices() -> None:
    quiet = [[1.0, 2.0] for _ in range(8)]
    disturbed = [[1.0 + 5 * (pair == 1), 2.0 + 9 * (pair in (3, 5))] for pair in range(8)]
    assert values_of([block(quiet, disturbed), block(disturbed, quiet)], "a") == pytest.approx([0.0, 0.0])


def test_names_exchanged_exchange_the_sign() -> None:
    rng = np.random.default_rng(0)
    base, head = rng.uniform(1, 2, (2, 5, 3)).tolist()
    one, other = values_of([block(base, head), block(head, base)], "a")
    assert one == pytest.approx(-other)
    assert one != 0


def test_work_in_varying_slices_is_named() -> None:
    with pytest.raises(ValueError, match="a: does its work in more slices one time than another on head"):
        values_of([block([[1.0], [1.0]], [[1.0], [0.5, 0.5]])], "a")


@pytest.mark.parametrize("count", [4, 8, 16])
def test_the_signed_rank_test_is_scipys_exact_one(count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(20):
        values = rng.normal(0.3, 1, count)
        assert signed_rank(values) == pytest.approx(wilcoxon(values, alternative="greater", method="exact").pvalue)


def test_zeros_and_ties_never_alarm() -> None:
    assert RULE.suspects(np.zeros(RULE.screen_blocks)) == 0
    assert RULE.suspects(np.array([0.05, -0.05] * (RULE.screen_blocks // 2))) == 0


def test_the_effect_is_deaf_to_an_outlier() -> None:
    assert effect(np.array([0.02] * 7 + [3.0])) == pytest.approx(0.02)


@pytest.mark.parametrize("benchmarks", [1, 6, 18, 500])
def test_the_levels_of_both_looks_multiply_to_the_promised_rate(benchmarks: int) -> None:
    assert RULE.screen_level * RULE.confirm_level(benchmarks) * benchmarks <= RULE.false_alarms + 1e-12


def test_each_look_keeps_its_level() -> None:
    """One-sided levels, held against every pattern of signs that there is."""
    count = RULE.screen_blocks
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * count)).reshape(count, -1).T
    # Far above the smallest effect, so that the level alone decides.
    alarms = RULE.suspects(signs * np.linspace(1, 2, count))
    assert 0 < np.mean(alarms > 0) <= RULE.screen_level / 2
    assert 0 < np.mean(alarms < 0) <= RULE.screen_level / 2


@pytest.mark.parametrize("noise", ["loud", "in waves", "heavy tails"])
def test_false_alarms_are_one_run_in_a_thousand_at_most(noise: str) -> None:
    values = {
        "loud": recorded(0.05),
        "in waves": recorded(0.02, drift=3.0),
        "heavy tails": recorded(0.02, heavy=True),
    }[noise]
    assert power.alarms(values, RULE, 20_000).bound <= power.PROMISED


def test_a_rule_without_a_second_look_would_alarm_too_often() -> None:
    """What the promise would be worth otherwise."""
    careless = replace(RULE, false_alarms=1.0)
    assert power.alarms(recorded(0.05), careless, 2000).alarms > 20


def test_slowdowns_are_seen_on_a_machine_that_is_quiet_enough() -> None:
    values = recorded(0.007)
    for slower, part in power.SLOWER.items():
        assert power.caught(values, RULE, slower, 1000).min() >= part


def test_what_is_smaller_than_the_smallest_effect_never_fails() -> None:
    assert power.caught(recorded(0.0001), RULE, 0.008, 1000).max() == 0


def test_more_noise_needs_more_repeats() -> None:
    quiet, loud = (power.needed(recorded(noise), RULE, 200) for noise in (0.005, 0.025))
    assert quiet is not None
    assert loud is not None
    assert loud.screen_blocks > quiet.screen_blocks
    assert power.needed(recorded(0.5), RULE, 200) is None
