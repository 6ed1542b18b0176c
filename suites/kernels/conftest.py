"""Kernel suites: collected when they are asked for (`make kernels`), free of cost otherwise, Triton's import included.

Without a CUDA device the kernels run under Triton's interpreter. Triton looks at the variable when it is imported, and
at the knob of the same meaning when a kernel file is. Only the knob stays set: child processes, and the engine's own
choice of a backend, go by the variable.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch


def _asked(config: pytest.Config) -> bool:
    expression = config.option.markexpr
    return "kernels" in expression and "not kernels" not in expression


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.suffix == ".py" and not _asked(config) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "kernels" in item.path.parts[-2:]:
            item.add_marker("kernels")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Before the first kernel file is imported."""
    if _asked(collector.config) and not torch.cuda.is_available():
        _use_interpreter()


def _use_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language

    del os.environ["TRITON_INTERPRET"]
    triton.knobs.runtime.interpret = True
    from triton.runtime.interpreter import InterpretedFunction

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        """What Triton does here, less patching its language anew: the kernel that calls has patched it already, and
        at each call that takes longer than most functions."""
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call_device_function


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
