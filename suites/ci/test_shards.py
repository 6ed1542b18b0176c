"""Suites are spread within 4/3 of the best plan, and no shard is given more than its time limit allows."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ci import runners, shards, stages
from ci.cli import app
from ci.registry import Registration
from suites.registration import suite

suite(seconds=1.2, stage="cpu", needs="cpu")

Registrations = tuple[Registration, ...]
SECONDS = st.floats(0.1, 600)
quick = settings(max_examples=30)
"""Spreading takes a millisecond, so the fast tier can do with more examples than one that runs engines."""


def named(seconds: Sequence[float]) -> dict[str, float]:
    return {f"suites/test_{index:03}.py": value for index, value in enumerate(seconds)}


def longest(seconds: dict[str, float], spread: shards.Shards) -> float:
    return max(sum(seconds[path] for path in shard) for shard in spread)


def at_least(seconds: dict[str, float], count: int) -> float:
    """What no plan undercuts: the mean, and the least that some shard has when more files than shards are among the
    longest."""
    falling = sorted(seconds.values(), reverse=True)
    pigeonholes = [
        sum(falling[k * count - k : k * count + 1])
        for k in range(len(falling) // count + 1)
        if k * count < len(falling)
    ]
    return max(sum(falling) / count, *pigeonholes)


@quick
@given(st.lists(SECONDS, min_size=200, max_size=200), st.integers(1, 16))
def test_200_suites_are_within_four_thirds_of_the_best_plan(seconds: list[float], count: int) -> None:
    suites = named(seconds)
    spread = shards.spread(suites, count)
    assert sorted(path for shard in spread for path in shard) == sorted(suites)
    assert len(spread) == count
    assert longest(suites, spread) <= 4 / 3 * at_least(suites, count) + 1e-6


@pytest.mark.parametrize("count", range(1, 17))
def test_200_suites_as_uneven_as_real_ones_are_too(count: int) -> None:
    suites = named([random.Random(count).paretovariate(1.1) for _ in range(200)])
    assert longest(suites, shards.spread(suites, count)) <= 4 / 3 * at_least(suites, count) + 1e-6


@quick
@given(st.lists(SECONDS, min_size=1, max_size=6), st.integers(1, 3))
def test_few_suites_are_within_four_thirds_of_the_exact_optimum(seconds: list[float], count: int) -> None:
    suites = named(seconds)
    best = min(
        max(
            sum(value for value, place in zip(seconds, places, strict=True) if place == shard) for shard in range(count)
        )
        for places in product(range(count), repeat=len(seconds))
    )
    assert at_least(suites, count) <= best + 1e-6
    assert longest(suites, shards.spread(suites, count)) <= (4 / 3 - 1 / (3 * count)) * best + 1e-6


@quick
@given(st.lists(SECONDS, min_size=1, max_size=40), st.floats(600, 2000))
def test_no_shard_is_given_more_than_it_holds(seconds: list[float], capacity: float) -> None:
    suites = named(seconds)
    assert longest(suites, shards.fitted(suites, capacity)) <= capacity


@pytest.mark.parametrize("count", range(2, 17))
def test_a_long_suite_does_not_wait_for_the_short_ones(count: int) -> None:
    """The worst case of any other order: it would end at nearly twice the best time."""
    suites = named([1.0] * (count * (count - 1)) + [float(count)])
    assert longest(suites, shards.spread(suites, count)) == count


def test_a_shard_is_added_where_the_mean_would_fit_and_the_suites_do_not() -> None:
    suites = named([4.0, 4.0, 4.0])
    assert [len(shard) for shard in shards.fitted(suites, 6.0)] == [1, 1, 1]


def test_a_suite_that_no_shard_holds_is_refused_with_the_mend() -> None:
    with pytest.raises(ValueError, match=r"test_000.py: takes 700 s, and a shard holds 600 s; split the file, or give"):
        shards.fitted(named([700]), 600)


def test_shards_are_planned_to_three_quarters_of_the_time_limit(registrations: Registrations) -> None:
    known = stages.load()
    for group in shards.groups(registrations, known):
        for shard in group.shards:
            assert group.load(shard) <= 0.75 * 60 * known[group.stage].minutes


def test_every_registration_is_in_one_shard_of_its_stage(registrations: Registrations) -> None:
    known = stages.load()
    for count in (1, 2, 5):
        for stage in known:
            for needs in runners.load():
                mine = sorted(
                    one.path
                    for one in registrations
                    if one.needs == needs and one.stage == (known[stage].suites_of or stage)
                )
                parts = [
                    shards.shard(registrations, known, stage, needs, f"{number}/{count}")
                    for number in range(1, count + 1)
                    if mine
                ]
                assert sorted(path for part in parts for path in part) == mine


def test_the_full_tier_is_planned_with_longer_times(registrations: Registrations) -> None:
    known = stages.load()
    found = shards.groups(registrations, known)
    cpu, full = (shards.group_of(found, stage, "cpu") for stage in ("cpu", "full"))
    assert {path: known["full"].times * seconds for path, seconds in cpu.seconds.items()} == full.seconds


def test_the_plan_is_printed_as_it_is(registrations: Registrations) -> None:
    told = CliRunner().invoke(app, ["plan", "--stage", "cpu", "--shards", "2", "--json"])
    (group,) = json.loads(told.stdout)
    parts = [shards.shard(registrations, stages.load(), "cpu", "cpu", f"{number}/2") for number in (1, 2)]
    assert [set(shard) for shard in group["shards"]] == parts


def test_a_stage_that_there_is_not_is_named() -> None:
    told = CliRunner().invoke(app, ["plan", "--stage", "weekly"])
    assert told.exit_code == 2
    assert "--stage weekly" in told.stderr
