"""Fixtures of the conformance suite."""

from __future__ import annotations

import pytest


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether the full tier runs: sweeps then go over everything."""
    return bool(request.config.getoption("--tier") == "full")
