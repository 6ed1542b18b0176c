"""Anything that can be done to an engine, in any order: every invariant holds after every step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from harness.workloads.lane import Lane
from harness.workloads.machine import EngineMachine
from suites.registration import suite

suite(seconds=3.5, stage="cpu", needs="cpu")

STEPS = {"fast": 15, "full": 50}


def test_any_history(lane: Lane, tier: str, pytestconfig: pytest.Config) -> None:
    lane.grey_box()
    folder = pytestconfig.rootpath / "build" / "reproducers"
    examples = max(2, settings().max_examples // 2)
    run_state_machine_as_test(
        lambda: EngineMachine(lane, folder),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS[tier],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
