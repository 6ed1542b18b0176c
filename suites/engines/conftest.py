"""transformers in its worker process, for all suites of its adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.contract import DrafterSetup, Engine, EngineSetup
from harness.workloads.lanes import factory_of

Start = Callable[..., Engine]
"""(target, drafter, fields of `EngineSetup`) -> an engine."""


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Engines that end with the module."""
    with ExitStack() as stack:

        def started(target: Path, drafter: DrafterSetup | None = None, **fields: Any) -> Engine:
            engine = factory_of("transformers").start(EngineSetup(target=target, drafter=drafter, **fields))
            stack.callback(engine.close)
            return engine

        yield started
