"""Which invariants a test speaks for, and on which drafter lane."""

from __future__ import annotations

import pytest

NO_LANE = "no lane"
"""Stands for the lane of a test that has none: its lanes were not asked for."""


def invariant_ids(item: pytest.Item) -> tuple[str, ...]:
    """The catalogue ids of the item's `invariant` markers, in order, each once."""
    return tuple(dict.fromkeys(name for marker in item.iter_markers("invariant") for name in marker.args))


def lane_of(item: pytest.Item) -> str | None:
    """Name of the drafter lane, or None when the test takes no lane."""
    callspec = getattr(item, "callspec", None)
    return str(callspec.params["lane"]) if callspec is not None and "lane" in callspec.params else None
