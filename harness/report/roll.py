"""What tests ask for, told by each worker before it runs any: one that dies takes along all that it has not said."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from harness.report.marks import invariant_ids, lane_of
from harness.report.places import write_whole

_INPUT = "draftproof_roll"
DIED = "???"
"""The phase that xdist gives to the report of a test whose worker died."""


class Roll:
    """(lane, invariants) by node id, handed from the workers to the controller through a file of this run."""

    def __init__(self, config: pytest.Config) -> None:
        told = getattr(config, "workerinput", {}).get(_INPUT)
        self._folder: TemporaryDirectory[str] | None = None
        self._file = Path(told) if told else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Of the controller: there are workers, so a file is needed."""
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="draftproof-roll-")
            self._file = Path(self._folder.name, "roll.json")
        node.workerinput[_INPUT] = str(self._file)

    def pytest_unconfigure(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def call(self, items: Iterable[pytest.Item]) -> None:
        """Of a worker: say what is going to run."""
        assert self._file is not None
        asked = {item.nodeid: (lane_of(item) or "-", invariant_ids(item)) for item in items if invariant_ids(item)}
        write_whole(self._file, json.dumps(asked))

    def of(self, nodeid: str) -> tuple[str, tuple[str, ...]] | None:
        """Lane and invariants of a test; None for one that asks for none."""
        if self._file is None or not self._file.is_file():
            return None
        found = json.loads(self._file.read_text(encoding="utf-8")).get(nodeid)
        return None if found is None else (str(found[0]), tuple(found[1]))
