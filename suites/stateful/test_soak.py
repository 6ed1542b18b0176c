"""A short soak finds nothing on a sound engine, and finds an engine that decays."""

from __future__ import annotations

from itertools import islice

import pytest

from harness.workloads import soak
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from reference_engine.scheduler import Scheduler
from suites.registration import suite

suite(seconds=0.7, stage="cpu", needs="cpu")

WALK = vocabulary("walk")
SETUP = {"family": "walk", "page_size": 4, "num_pages": 120}


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "ROUND", 12)


@pytest.mark.drafters("STANDALONE", "MTP")
def test_a_sound_engine_does_not_drift(lane: Lane, tier: str) -> None:
    rounds = 4 if tier == "fast" else 30
    with lane.start(**SETUP) as engine:
        watched = list(islice(soak.soak(lane, engine, WALK, 10**9), rounds))
    for _, violations in watched:
        lane.check(violations)
    acceptance = [one.acceptance for one, _ in watched]
    assert acceptance[0] == acceptance[3], "the same traffic is accepted alike"
    assert all(0 < share < 1 for share in acceptance if share is not None)
    assert watched[3][0].hits > watched[0][0].hits, "the prefix cache has not warmed up"


@pytest.mark.drafters("STANDALONE")
def test_a_page_lost_now_and_then_is_found(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, ended = Scheduler.finish, []

    def leaky(self: Scheduler, request: object) -> None:
        ended.append(request)
        if len(ended) % 20 == 0 and request.pages:  # type: ignore[attr-defined]
            request.pages.pop()  # type: ignore[attr-defined]
        finish(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "finish", leaky)
    with lane.start(**SETUP) as engine:
        watched = list(islice(soak.soak(lane, engine, WALK, 10**9), 2))
    assert "KV-1" in {violation.invariant for _, violations in watched for violation in violations}
