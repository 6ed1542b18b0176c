"""LAW: sampled requests have the law that they asked for, token by token and block by block, and seeds bind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from harness.contract import Refused, Request, Run
from harness.invariants import Violation, law_1, law_2, law_3, law_3_independent
from harness.oracles.evidence import Evidence
from harness.workloads.lane import Lane
from harness.workloads.lanes import DraftMethod
from harness.workloads.laws import (
    COIN_IDS,
    GROUPS,
    NUM_STEPS,
    PLANS,
    Plan,
    RequestedLaw,
    copies,
    filtered_batch,
    independence_alpha,
    kinds,
    law_alpha,
    many_at_once,
    num_tests,
    rounds,
)
from harness.workloads.strategies import Batch, tight_pool
from suites.conformance.arrange import DRAWING, LAW_IDS, RecordExamples, draft_methods, run_sampled, sampled_batch
from suites.registration import suite
from suites.tiers import FULL

suite(seconds=9, stage="cpu", needs="cpu")

METHODS = pytest.mark.parametrize("method", draft_methods("greedy"))
"""Drawn drafts are judged exactly in every run, place by place, in `suites/reference_engine/test_engine_law.py`."""

FITS = [pytest.param(group, "greedy") for group in GROUPS] + [
    pytest.param(group, "probabilistic", marks=[pytest.mark.drafters(*DRAWING)] + [FULL] * (group != "memoryless"))
    for group in GROUPS
]
"""Of drawn drafts one group in every run: what they are weighed by may not be what they were drawn from."""


def troubled(batch: Batch) -> dict[str, Any]:
    """Prefills in chunks, padded batches, a pool in which requests must be preempted."""
    pages = tight_pool(batch.requests, 4, batch.k, 12)
    return {"chunk_size": 5, "page_size": 4, "num_pages": pages, "max_running": 12, "batch_buckets": (3, 12)}


@pytest.mark.invariant("LAW-1")
@METHODS
def test_nothing_impossible_is_emitted(lane: Lane, method: DraftMethod) -> None:
    batch = sampled_batch(lane, method)
    law = RequestedLaw(lane.target("law"), lane.capabilities)
    ways = ({}, troubled(batch)) if lane.capabilities.grey_box else ({},)
    for changes in ways:
        lane.check(law_1(run_sampled(lane, batch, method, **changes), law))


@pytest.mark.invariant("LAW-1")
@METHODS
def test_filters_in_any_combination(lane: Lane, method: DraftMethod) -> None:
    """Verification keeps the tokens that the plain sampler would keep, whichever filters act on what others left."""
    lane.needs("temperature", "seed")
    batch = filtered_batch(lane.claims(method), LAW_IDS)
    law = RequestedLaw(lane.target("law"), lane.capabilities)
    lane.check(law_1(run_sampled(lane, batch, method), law))


@pytest.mark.invariant("LAW-3")
@METHODS
def test_a_seed_gives_the_same_output(
    lane: Lane, method: DraftMethod, tier: str, record_examples: RecordExamples
) -> None:
    """Again, among others in another order, in chunks and preempted, with overlap, and alone."""
    batch = sampled_batch(lane, method)
    run = run_sampled(lane, batch, method)
    if "seed" not in lane.claims(method):
        raise Refused("seed: not claimed in this set-up, so no sampled request comes out twice")
    ways: dict[str, Any] = {"again": {"warm": True}}
    if lane.capabilities.grey_box:
        ways |= {"troubled": troubled(batch), "overlap": {"overlap": True}}
    for name, changes in ways.items():
        variant = run_sampled(lane, batch, method, **changes)
        lane.check(law_3(run, variant, name=name, accept_lens=lane.speculative))
    lane.check(law_3(run, run_sampled(lane, replace(batch, requests=batch.requests[::-1]), method), name="reversed"))
    if lane.capabilities.grey_box:
        assert any(step.preempted for step in run_sampled(lane, batch, method, **troubled(batch)).steps)
    for request in some(batch.requests, tier):
        alone = run_sampled(lane, replace(batch, requests=(request,)), method)
        lane.check(law_3(run, alone, name="alone", accept_lens=lane.speculative))
        record_examples(1)


def some(requests: tuple[Request, ...], tier: str) -> tuple[Request, ...]:
    """The sampled ones, all of them in the full tier, else every eighth."""
    sampled = tuple(request for request in requests if not request.sampling.greedy)
    return sampled if tier == "full" else sampled[::8]


@pytest.mark.invariant("LAW-3")
@METHODS
def test_without_a_seed_copies_differ(lane: Lane, method: DraftMethod) -> None:
    twins = copies(lane.claims(method), LAW_IDS)
    run = lane.run(twins, family="law", k=NUM_STEPS, draft_sample_method=method)
    lane.check(law_3_independent(run, RequestedLaw(lane.target("law"), run.capabilities), independence_alpha()))


ControlArms = dict[tuple[str, str, str, Plan], list[Violation]]


@pytest.fixture(scope="session")
def control_arms() -> ControlArms:
    """What LAW-2 found without speculation, by engine, target, group and plan: lanes of one target share it."""
    return {}


@pytest.mark.invariant("LAW-2")
@pytest.mark.parametrize(("group", "method"), FITS)
def test_goodness_of_fit(lane: Lane, group: str, method: DraftMethod, tier: str, control_arms: ControlArms) -> None:
    """Without speculation first: if that arm fails, it is reported, and speculation is not judged."""
    plan = PLANS[tier][group]
    arm = (lane.engine, lane.spec.target_folder(), group, plan)
    if arm not in control_arms:
        control_arms[arm] = misfits(lane, group, plan, speculative=False)
    if lane.speculative or control_arms[arm]:
        lane.check(misfits(lane, group, plan, control_arms[arm], draft_sample_method=method))


def misfits(
    lane: Lane, group: str, plan: Plan, control: list[Violation] | None = None, **setup: Any
) -> list[Violation]:
    """LAW-2 of unseeded requests of a group, mixed with greedy ones."""
    with lane.start(family="coin", k=NUM_STEPS, **many_at_once(plan), **setup) as engine:
        claims = engine.capabilities
        wanted = kinds(claims.features, GROUPS[group])
        runs: Iterator[Run] = rounds(engine, wanted, plan, COIN_IDS)
        law = RequestedLaw(lane.target("coin"), claims)
        evidence = partial(Evidence, plan.strength)
        return law_2(runs, law, evidence, law_alpha(), num_tests(group), control or ())
