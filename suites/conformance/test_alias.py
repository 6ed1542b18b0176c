"""ALIAS: every row is its owner's, and nobody's result is somebody else's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from harness.contract import Request, Run, SamplingParams
from harness.contract.request import PooledRows
from harness.invariants import (
    Scribbler,
    Violation,
    alias_1,
    alias_1_layers,
    alias_1_pooled,
    alias_2,
    alias_2_scribbled,
)
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.scenarios import (
    abort_storm,
    chunked_prefill,
    overlap_buckets,
    ragged_eight,
    repeats,
    short_prompts,
    tiny_pool_preemption,
    warm_prefix,
)
from harness.workloads.strategies import Batch, batches
from suites.conformance.arrange import ROW_BATCH, ROWS, MakeBatch, RecordExamples, offering, scenarios, watched
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=5.7, stage="cpu", needs="cpu")

TELLING = (ragged_eight, short_prompts, tiny_pool_preemption, warm_prefix, overlap_buckets)
KEEPING_LAYERS = [name for name, spec in LANES.items() if spec.keeps_layers]
STUTTER = vocabulary("census-stutter")
"""Here a token may follow itself, so that its draft is accepted and a step has two sampled columns."""
STUTTER_BATCH = batches(STUTTER, mixed=False)
"""Nobody asks for hidden states, so that prefixes are taken from the cache."""


def kept(lane: Lane, run: Run, family: str) -> list[Violation]:
    return alias_1_layers(run, lane.layer_states(family)) if lane.spec.keeps_layers else []


@pytest.mark.invariant("ALIAS-1")
@given(batch=ROW_BATCH)
def test_rows_are_their_owners(lane: Lane, batch: Batch) -> None:
    lane.needs("return_hidden_states")
    run = lane.run_batch(batch, family=ROWS.family)
    lane.check(alias_1(run, lane.rows(ROWS.family)) + kept(lane, run, ROWS.family))


@pytest.mark.invariant("ALIAS-1")
def test_rows_are_their_owners_in_scenarios(lane: Lane, record_examples: RecordExamples) -> None:
    lane.needs("return_hidden_states")
    for _, run in scenarios(lane, ROWS, TELLING, watched):
        lane.check(alias_1(run, lane.rows(ROWS.family)) + kept(lane, run, ROWS.family))
        record_examples(1)


@pytest.mark.invariant("ALIAS-1")
@pytest.mark.drafters(*KEEPING_LAYERS)
@given(batch=STUTTER_BATCH)
def test_kept_layers_are_their_owners(lane: Lane, batch: Batch) -> None:
    lane.check(kept(lane, lane.run_batch(batch, family=STUTTER.family), STUTTER.family))


@pytest.mark.invariant("ALIAS-1")
@pytest.mark.drafters(*KEEPING_LAYERS)
@pytest.mark.parametrize("make", [repeats, warm_prefix, tiny_pool_preemption, chunked_prefill, abort_storm])
def test_kept_layers_are_their_owners_in_scenarios(lane: Lane, make: MakeBatch) -> None:
    """Accepted drafts, prefix hits, resumed requests and chunk borders, without hidden states."""
    batch = make(STUTTER)
    batch = replace(batch, requests=tuple(replace(r, return_hidden_states=False) for r in batch.requests))
    run = lane.run_batch(batch, family=STUTTER.family)
    if make is repeats:
        assert {2} < {length for done in run.completions for length in done.accept_lens or ()}, "no draft is accepted"
    lane.check(kept(lane, run, STUTTER.family))


@pytest.mark.invariant("ALIAS-2")
@given(batch=ROW_BATCH)
def test_no_shared_memory(lane: Lane, batch: Batch) -> None:
    lane.grey_box()
    lane.check(alias_2(offering(lane.run_batch(batch, family=ROWS.family), "hidden")))


@pytest.mark.invariant("ALIAS-2")
@pytest.mark.parametrize("make", tiered([short_prompts, tiny_pool_preemption, abort_storm], tiny_pool_preemption))
def test_overwriting_a_result_changes_nothing_else(lane: Lane, make: MakeBatch) -> None:
    lane.grey_box()
    batch = watched(make(ROWS))
    scribbler = Scribbler()
    scribbled = lane.run_batch(batch, family=ROWS.family, on_step=scribbler)
    lane.check(alias_2_scribbled(lane.run_batch(batch, family=ROWS.family), scribbled, scribbler))


def judge_means(lane: Lane, batch: Batch) -> list[Violation]:
    """Run the batch with the mean of other rows for each request in turn; every other one shows its rows as well."""
    lane.needs("pooled_hidden")
    kinds: tuple[PooledRows, ...] = ("output", "both", "prompt")
    requests = tuple(
        replace(request, pooled_hidden=kinds[place % 3], return_hidden_states=place % 2 == 0)
        for place, request in enumerate(batch.requests)
    )
    run = lane.run_batch(replace(batch, requests=requests), family=ROWS.family)
    rows = lane.rows(ROWS.family)
    return alias_1_pooled(run, rows) + alias_1(run, rows) + alias_2(run)


@pytest.mark.invariant("ALIAS-1", "ALIAS-2")
@settings(max_examples=max(1, settings().max_examples // 8))
@given(batch=ROW_BATCH)
def test_means_are_of_their_own_rows(lane: Lane, batch: Batch) -> None:
    lane.check(judge_means(lane, batch))


@pytest.mark.invariant("ALIAS-1", "ALIAS-2")
def test_means_of_a_single_row(lane: Lane) -> None:
    """The prompt is one token, or one output token was an input; an output of one token has no row at all."""
    lane.needs("pooled_hidden")
    caps: dict[PooledRows, int] = {"prompt": 6, "output": 2, "both": 1}
    requests = [
        Request(
            request_id=which,
            prompt_token_ids=ROWS.prompt(1, seed),
            sampling=SamplingParams(max_new_tokens=cap),
            pooled_hidden=which,
        )
        for seed, (which, cap) in enumerate(caps.items())
    ]
    requests.append(replace(requests[1], request_id="none", sampling=SamplingParams(max_new_tokens=1)))
    run = lane.run(requests, family=ROWS.family)
    lane.check(alias_1_pooled(run, lane.rows(ROWS.family)) + alias_2(run))


@pytest.mark.invariant("ALIAS-1", "ALIAS-2")
def test_means_are_of_their_own_rows_in_scenarios(lane: Lane, thorough: bool, record_examples: RecordExamples) -> None:
    """Blocks cut by the end of a request, preemption, chunks of the prompt; in the full tier prefixes and aborts."""
    crowd = tiny_pool_preemption(ROWS)
    batches = [replace(crowd, requests=crowd.requests[1::2], changes=(*crowd.changes, ("chunk_size", 5)))]
    if thorough:
        batches += [crowd, *(make(ROWS) for make in (short_prompts, warm_prefix, abort_storm, overlap_buckets))]
    for batch in batches:
        lane.check(judge_means(lane, batch))
        record_examples(1)
