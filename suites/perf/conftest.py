"""Benchmarks: collected when they are asked for (`make bench`), free of cost otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.perf.checkpoints import CHECKPOINTS
from suites.perf import asked_for


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.suffix == ".py" and not asked_for(config) else None


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every checkpoint that is measured, by name."""
    directory = tmp_path_factory.mktemp("perf")
    return {name: one.write(directory) for name, one in CHECKPOINTS.items()}
