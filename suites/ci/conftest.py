"""What is read once."""

from __future__ import annotations

import pytest

from ci import registry, render
from ci.registry import Registration


@pytest.fixture(scope="session")
def registrations() -> tuple[Registration, ...]:
    """Of this repository."""
    return registry.must_read()


@pytest.fixture(scope="session")
def rendered() -> dict[str, str]:
    """Files of .github by their path in it."""
    return render.rendered()
