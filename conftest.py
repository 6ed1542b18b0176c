"""Shared by every suite. The `draftproof` plugin itself comes from the installed entry point."""

from __future__ import annotations

pytest_plugins = ["pytester"]


def pytest_configure() -> None:
    """A process interprets Triton kernels or compiles them, so that is settled before any test module is imported."""
    from suites.kernels.interpreter import use_interpreter

    use_interpreter()
