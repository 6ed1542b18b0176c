"""Benchmarks, serial: they report, the gate (`draftproof perf gate`) judges."""

from __future__ import annotations

import pytest


def asked_for(config: pytest.Config) -> bool:
    """Whether benchmarks are to be collected."""
    expression = config.option.markexpr
    return "perf" in expression and "not perf" not in expression


def refuse_workers(config: pytest.Config) -> None:
    """Raises UsageError: pytest-benchmark measures nothing under xdist, and says so in a line that nobody reads."""
    workers = getattr(config.option, "numprocesses", None) or getattr(config.option, "tx", None)
    if asked_for(config) and workers:
        raise pytest.UsageError("-m perf with -n: benchmarks run one after another; leave -n out, or say -n 0")
