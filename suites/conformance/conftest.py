"""Fixtures of the conformance suite."""

from __future__ import annotations

import pytest


@pytest.fixture
def thorough(tier: str) -> bool:
    """Whether the full tier runs: sweeps then go over everything."""
    return tier == "full"
