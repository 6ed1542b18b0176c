"""The fast tier runs conformance tests on a part of the lanes each, in turn, so that every lane sees a part of them and
every test some lanes. The full tier gets all, and so does whoever asks for a lane or a test, or for the conformance
suite: that of a slow engine, each of whose set-ups takes seconds to start, takes turns even then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TypeGuard

import pytest

from harness.report.marks import invariant_ids, lane_of

TURNS = 6
"""Each scripted test runs on every sixth lane: two of twelve."""

PROPERTY_TURNS = 3
"""Each property test on every third lane."""


def asked_for_by_name(config: pytest.Config, suite: Path, *, slow: bool = False) -> bool:
    """Whether `suite`, or something in it, was asked for, and not just what holds it; of a `slow` engine, whether
    something in it was."""
    option = config.option
    if option.keyword or config.getoption("--drafter") or config.getoption("--invariant"):
        return True
    roots = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    return any(root.resolve().is_relative_to(suite) and not (slow and root.resolve() == suite) for root in roots)


def out_of_turn(
    items: Iterable[pytest.Item], lanes: Sequence[str], always: Collection[str] = frozenset()
) -> set[pytest.Item]:
    """The items whose turn it is not. No cell of the scorecard and no test is left empty. Those of other lanes than
    `lanes` are let alone: an engine declines them at the door. `always`: names of tests, with their parameters, that do
    not rest."""
    taking_turns = [item for item in items if lane_of(item) in lanes and invariant_ids(item)]
    places: dict[str, int] = {}
    resting: list[pytest.Item] = []
    left = Counter[Hashable]()
    due = _due(taking_turns)
    for item in taking_turns:
        lane = str(lane_of(item))
        place = places.setdefault(_test(item, lane), len(places))
        turns = PROPERTY_TURNS if is_property(item) else TURNS
        if (place + lanes.index(lane)) % turns == 0 or item.nodeid.rpartition("/")[2] in always:
            left.update(due[item])
        else:
            resting.append(item)
    dropped = set()
    for item in resting:
        if all(left[one] for one in due[item]):
            dropped.add(item)
        else:
            left.update(due[item])
    return dropped


def is_property(item: pytest.Item) -> TypeGuard[pytest.Function]:
    from hypothesis import is_hypothesis_test

    return isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)


def _test(item: pytest.Item, lane: str) -> str:
    """Name of the test with its other parameters."""
    return item.nodeid.replace(f"[{lane}", "[", 1)


def _due(items: Iterable[pytest.Item]) -> dict[pytest.Item, list[Hashable]]:
    """What each item stands for, and must run at least once: its test, and the cells of which no test asks for less. A
    test that asks for more may fail for another invariant, and then tells nothing of this one."""
    asked = {item: (str(lane_of(item)), invariant_ids(item)) for item in items}
    fewest: dict[tuple[str, str], int] = {}
    for lane, names in asked.values():
        for name in names:
            fewest[lane, name] = min(len(names), fewest.get((lane, name), len(names)))
    return {
        item: [*((lane, name) for name in names if fewest[lane, name] == len(names)), _test(item, lane)]
        for item, (lane, names) in asked.items()
    }
