"""The fast tier's turns: a part of the scripted tests for each lane, and nothing left empty."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.report.rotation import TURNS, out_of_turn
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

LANES = [f"lane{number}" for number in range(12)]


def item(test: str, lane: str | None, *invariants: str) -> Any:
    marker = SimpleNamespace(args=invariants)
    return SimpleNamespace(
        nodeid=f"{test}[{lane}]",
        callspec=SimpleNamespace(params={} if lane is None else {"lane": lane}),
        iter_markers=lambda _name: iter([marker] if invariants else []),
    )


class Item(SimpleNamespace):
    """Hashable by identity, as pytest's are."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def items(tests: dict[str, tuple[str, ...]], lanes: list[str] = LANES) -> list[Any]:
    return [Item(**vars(item(test, lane, *ids))) for test, ids in tests.items() for lane in lanes]


def kept(found: list[Any]) -> list[Any]:
    dropped = out_of_turn(found, LANES)
    return [one for one in found if one not in dropped]


def test_every_test_runs_on_some_lanes_and_every_lane_has_some() -> None:
    found = items({f"test_{number}": ("A-1",) for number in range(2 * TURNS)})
    left = kept(found)
    assert len(left) == len(found) / TURNS
    for lane in LANES:
        assert sum(one.callspec.params["lane"] == lane for one in left) == 2


def test_no_cell_is_left_empty() -> None:
    """Fewer tests than turns: some lanes would have none."""
    found = items({"test_a": ("A-1",), "test_b": ("A-1", "B-1"), "test_c": ("A-1",)})
    cells = {(one.callspec.params["lane"], name) for one in kept(found) for name in ("A-1",)}
    assert cells == {(lane, "A-1") for lane in LANES}
    assert sum(one.nodeid.startswith("test_b") for one in kept(found)) == len(LANES), "B-1 has no other test"


def test_no_test_is_left_out() -> None:
    """A test of one lane runs there, whoever's turn it is."""
    found = [
        *items({"test_everywhere": ("A-1",)}),
        *items({f"test_{number}": ("A-1",) for number in range(TURNS)}, LANES[:1]),
    ]
    names = {one.nodeid.partition("[")[0] for one in kept(found)}
    assert names == {"test_everywhere", *(f"test_{number}" for number in range(TURNS))}


def test_a_cell_is_kept_by_a_test_that_asks_for_little() -> None:
    """One that asks for more may fail for another invariant, and then tells nothing of this one."""
    found = items({"test_wide": ("A-1", "B-1"), "test_narrow": ("A-1",)})
    narrow = [one for one in kept(found) if one.nodeid.startswith("test_narrow")]
    assert [one.callspec.params["lane"] for one in narrow] == LANES


def test_what_shows_a_finding_does_not_rest() -> None:
    found = items({f"suites/x/test_x.py::test_{number}": ("A-1",) for number in range(2 * TURNS)})
    always = {"test_x.py::test_2[lane0]", "test_x.py::test_3[lane1]"}
    left = [one for one in found if one not in out_of_turn(found, LANES, always)]
    assert {one.nodeid.rpartition("/")[2] for one in left} >= always
    assert len(left) == len(kept(found)) + len(always)


@pytest.mark.parametrize(("where", "ids"), [(None, ("A-1",)), ("lane3", ())])
def test_what_is_no_conformance_test_always_runs(where: str | None, ids: tuple[str, ...]) -> None:
    found = [Item(**vars(item(f"test_{number}", where, *ids))) for number in range(8)]
    assert kept(found) == found
