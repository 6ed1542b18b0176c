"""Where engines break: sizes around pages, chunks, blocks, buckets and the context. Every invariant judges each run."""

from __future__ import annotations

import pytest

from harness.workloads.boundaries import BOUNDARIES, LENGTHS
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.verdicts import at_the_end
from suites.conformance.arrange import RecordExamples
from suites.registration import suite

suite(seconds=1.4, stage="cpu", needs="cpu")

IN_EVERY_RUN = {"pages_and_chunks": 4, "context_limit": 5, "between_buckets": 2, "token_zero": 1}
"""Draft length of each sweep in the fast tier."""

SWEEPS = [
    pytest.param(name, k, marks=() if k == IN_EVERY_RUN[name] else pytest.mark.full, id=f"{name}-{k}")
    for name in BOUNDARIES
    for k in LENGTHS
]


@pytest.mark.invariant("EQUAL-1", "ACCEPT-1", "ALIAS-1", "COUNT-1", "LOGP-1", "SCHED-2")
@pytest.mark.parametrize(("name", "k"), SWEEPS)
def test_sizes(lane: Lane, name: str, k: int, record_examples: RecordExamples) -> None:
    make, family = BOUNDARIES[name]
    batch = make(vocabulary(family), k)
    run = lane.run_batch(batch, family=family)
    lane.check(at_the_end(lane, run, lane.run_batch(batch, family=family, speculative=False), family))
    record_examples(len(batch.requests))
