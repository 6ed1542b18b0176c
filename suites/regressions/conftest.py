"""Regressions re-create a historical bug in the reference engine, whatever engine the session is about."""

from __future__ import annotations

import pytest

from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from suites.regressions.support import DRAFTERS, FAST


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The fast tier leaves out the drafters that are like others."""
    if config.getoption("--tier") == "full":
        return
    slow = [item for item in items if _drafter_of(item) in set(DRAFTERS).difference(FAST)]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


def _drafter_of(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None or "drafter" not in item.fixturenames else callspec.params.get("drafter")


@pytest.fixture(scope="session", params=DRAFTERS)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lane:
    """The reference engine with one drafter: every regression is looked for with each of them."""
    return Lane("reference", LANES[request.param], tmp_path_factory.getbasetemp() / "known-answer")
