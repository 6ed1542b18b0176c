"""Parameters that wait for `--tier full`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

FULL = pytest.mark.full


def tiered(values: Iterable[Any], *in_every_run: Any) -> list[Any]:
    """Parameters of a test: those of `in_every_run` as they are, the others with `--tier full`."""
    return [value if value in in_every_run else _later(value) for value in values]


def _later(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=FULL)
