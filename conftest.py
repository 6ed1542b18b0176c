"""Shared by every suite. The `draftproof` plugin itself comes from the installed entry point."""

from __future__ import annotations

import os

import pytest

pytest_plugins = ["pytester"]


def pytest_configure(config: pytest.Config) -> None:
    """Temporary files stay inside the repository. A process interprets Triton kernels or compiles them, so that is
    settled before any test module is imported."""
    temporary = config.rootpath / "build" / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(temporary))
    from suites.kernels.interpreter import use_interpreter

    use_interpreter()
