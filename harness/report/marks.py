"""Which invariants a test speaks for."""

from __future__ import annotations

import pytest


def invariant_ids(item: pytest.Item) -> tuple[str, ...]:
    """The catalogue ids of the item's `invariant` markers, in order, each once."""
    return tuple(dict.fromkeys(name for marker in item.iter_markers("invariant") for name in marker.args))
