"""Kernel suites: under Triton's interpreter where there is no CUDA device, left out where there is no Triton."""

from __future__ import annotations

import pytest
import torch

from suites.kernels.interpreter import INSTALLED

collect_ignore_glob = [] if INSTALLED else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "kernels" in item.path.parts[-2:]:
            item.add_marker("kernels")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
