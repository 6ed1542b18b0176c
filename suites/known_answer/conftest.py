"""Families are built once: they hold no state."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from harness.known_answer import Family, family

# Several threads cost more than they bring on matrices this small.
torch.set_num_threads(1)

build_once: Callable[[str, str], Family] = cache(family)


@pytest.fixture(scope="session")
def families() -> Callable[[str, str], Family]:
    return build_once


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Directory of a family's checkpoints, written on first use."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def written(name: str, dtype: str) -> Path:
        directory = root / f"{name}-{dtype}"
        build_once(name, dtype).write(directory)
        return directory

    return written
