"""Which worker of a parallel run gets which tests: those of a lane stay together, since a worker remembers its runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import parse_tx_spec_config


class LaneScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A unit of work is a lane, or a test function that has none. Units are begun in the order of collection: lanes
    come first, and what ends the run is small."""

    def __init__(self, config: pytest.Config, log: Any, lanes: Collection[str]) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        # The longest first: one name may begin another.
        self._lanes = sorted(lanes, key=len, reverse=True)

    def _split_scope(self, nodeid: str) -> str:
        function, _, parameters = nodeid.partition("[")
        named = parameters.removesuffix("]") + "-"
        return next((lane for lane in self._lanes if named.startswith(lane + "-")), function)


def lane_scheduling(config: pytest.Config, log: Any, lanes: Collection[str]) -> LaneScheduling | None:
    """None where there are too few lanes to keep all workers busy, or something else was asked for."""
    wanted = config.getoption("dist") == "load" and len(lanes) >= 2 * len(parse_tx_spec_config(config))
    return LaneScheduling(config, log, lanes) if wanted else None
