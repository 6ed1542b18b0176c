"""SHAPE: drafts and emitted blocks have the agreed shape, and every slot holds an id or the placeholder."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from harness.invariants import equal_1, shape_1, shape_2
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.scenarios import ragged_eight
from harness.workloads.strategies import Batch
from harness.workloads.sweeps import WIDE, dead_ends
from suites.conformance.arrange import ANY_BATCH, WALK, RecordExamples, offering, scenarios
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=2, stage="cpu", needs="cpu")


@pytest.mark.invariant("SHAPE-1")
@given(batch=ANY_BATCH)
def test_drafts(lane: Lane, batch: Batch) -> None:
    lane.shows("propose")
    lane.check(shape_1(offering(lane.run_batch(batch), "propose")))


@pytest.mark.invariant("SHAPE-1")
@pytest.mark.parametrize("k", tiered(range(1, 7), 1, 6))
def test_drafts_of_any_length(lane: Lane, k: int) -> None:
    lane.shows("propose")
    batch = replace(ragged_eight(WALK), k=k)
    lane.check(shape_1(lane.run_batch(batch)))


@pytest.mark.invariant("SHAPE-2")
@given(batch=ANY_BATCH)
def test_ids(lane: Lane, batch: Batch) -> None:
    lane.check(shape_2(lane.run_batch(batch)))


@pytest.mark.invariant("SHAPE-2")
def test_ids_in_scenarios(lane: Lane, record_examples: RecordExamples) -> None:
    for _, run in scenarios(lane):
        lane.check(shape_2(run))
        record_examples(1)


@pytest.mark.invariant("SHAPE-2", "EQUAL-1")
@pytest.mark.parametrize("overlap", [False, True])
def test_ids_where_none_is_left_to_choose(lane: Lane, overlap: bool, record_examples: RecordExamples) -> None:
    """At every place of a block, behind drafts that are right. Overlapped, the next step runs on what is no token."""
    lane.needs("allowed_token_ids", "bad_words")
    perfect = vocabulary("walk-perfect")
    requests = dead_ends(perfect, 3)
    setup = lane.fit(Batch(requests, 3, changes=(("overlap", overlap),))).setup
    run = lane.run(requests, family=perfect.family, **WIDE, **setup)
    lane.check(shape_2(run) + equal_1(run, lane.baseline(requests, family=perfect.family, **WIDE)))
    if lane.capabilities.dead_end == "ends":
        assert [len(done.token_ids) for done in run.completions] == list(range(1, len(requests) + 1))
    record_examples(len(requests))
