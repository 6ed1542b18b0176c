"""Benchmarks: collected when they are asked for (`make bench`), free of cost otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    expression = config.option.markexpr
    asked = "perf" in expression and "not perf" not in expression
    return True if collection_path.suffix == ".py" and not asked else None
