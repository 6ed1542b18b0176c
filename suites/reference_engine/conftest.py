"""The reference engine on known-answer checkpoints that are written once per session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES

OpenLane = Callable[[str], Lane]


@pytest.fixture(scope="session")
def open_lane(tmp_path_factory: pytest.TempPathFactory) -> OpenLane:
    """A lane of the reference engine by its name in `LANES`, whatever engine the session is about."""
    root = tmp_path_factory.getbasetemp() / "known-answer"
    opened: dict[str, Lane] = {}

    def open_(name: str) -> Lane:
        return opened.setdefault(name, Lane("reference", LANES[name], root))

    return open_
