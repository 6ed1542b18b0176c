"""Regressions re-create a historical bug in the reference engine, whatever engine the session is about."""

from __future__ import annotations

import pytest

from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from suites.regressions.support import lanes


@pytest.fixture(scope="session", params=lanes())
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lane:
    """The reference engine with one drafter: every regression is looked for with each of them."""
    return Lane("reference", LANES[request.param], tmp_path_factory.getbasetemp() / "known-answer")
