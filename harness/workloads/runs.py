"""Runs that a test session remembers, because many invariants judge the same one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from harness.contract import Run

ROOM = 400


class RunCache:
    """The `ROOM` runs used last, by what was asked for. Shared by all lanes of a process: they share baselines."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Hashable, Run] = OrderedDict()

    def get(self, key: Hashable) -> Run | None:
        if key in self._runs:
            self._runs.move_to_end(key)
        return self._runs.get(key)

    def put(self, key: Hashable, run: Run) -> None:
        self._runs[key] = run
        while len(self._runs) > ROOM:
            self._runs.popitem(last=False)
