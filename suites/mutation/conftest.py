from __future__ import annotations

import pytest

from harness.mutants.runs import Laboratory


@pytest.fixture(scope="session")
def laboratory() -> Laboratory:
    """One process at a time: the tests themselves run in parallel."""
    return Laboratory(workers=1)
