"""Which worker gets which tests."""

from __future__ import annotations

import pytest

from harness.report.workers import lane_scheduling
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

LANES = ["none", "EAGLE", "EAGLE3", "EAGLE-tree"]


def test_a_lane_is_one_unit_and_so_is_any_other_function(pytester: pytest.Pytester) -> None:
    scheduling = lane_scheduling(pytester.parseconfig("--dist", "load", "--tx", "2*popen"), None, LANES)
    assert scheduling is not None
    units = {
        "a.py::one[EAGLE]": "EAGLE",
        "b.py::two[EAGLE-EAGLE3]": "EAGLE",
        "a.py::one[EAGLE3]": "EAGLE3",
        "a.py::one[EAGLE-tree-3]": "EAGLE-tree",
        "a.py::one": "a.py::one",
        "a.py::one[3-EAGLE]": "a.py::one",
        "a.py::one[nonetheless]": "a.py::one",
    }
    assert {nodeid: scheduling._split_scope(nodeid) for nodeid in units} == units


@pytest.mark.parametrize(("dist", "workers"), [("load", 3), ("loadfile", 2)])
def test_few_lanes_or_another_wish_leave_it_to_xdist(pytester: pytest.Pytester, dist: str, workers: int) -> None:
    config = pytester.parseconfig("--dist", dist, "--tx", f"{workers}*popen")
    assert lane_scheduling(config, None, LANES) is None
