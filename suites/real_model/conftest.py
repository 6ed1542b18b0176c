"""The real-model lane: collected when it is asked for (`make real-model`), free of cost otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    expression = config.option.markexpr
    asked = "real_model" in expression and "not real_model" not in expression
    return True if collection_path.suffix == ".py" and not asked else None
