"""LOGP: every log probability is the target's own, whatever block its token came from."""

from __future__ import annotations

import pytest
from hypothesis import given

from harness.invariants import logp_1
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.scenarios import chunked_prefill, mixed_flags, ragged_eight, tiny_pool_preemption
from harness.workloads.strategies import Batch, batches
from suites.conformance.arrange import MakeBatch, offering, scenarios, watched

LAW = vocabulary("law")


@pytest.mark.invariant("LOGP-1")
@given(batch=batches(LAW, timed=True))
def test_rows_equal_the_law(lane: Lane, batch: Batch) -> None:
    run = lane.run_batch(batch, family="law")
    lane.check(logp_1(offering(run, "logprobs"), lane.target("law").logprobs))


@pytest.mark.invariant("LOGP-1")
@pytest.mark.parametrize(
    ("family", "make"),
    [("law", ragged_eight), ("law-eos", mixed_flags), ("law-eos", tiny_pool_preemption), ("census", chunked_prefill)],
)
def test_rows_equal_the_law_in_scenarios(lane: Lane, family: str, make: MakeBatch) -> None:
    for _, run in scenarios(lane, vocabulary(family), [make], watched):
        lane.check(logp_1(run, lane.target(family).logprobs))
