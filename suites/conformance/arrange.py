"""What the conformance tests run: batches drawn by hypothesis, and the scripted scenarios.

Tests share these strategies on purpose: with one seed for all they draw the same batches, and a lane runs each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume

from harness.contract import Request, Run
from harness.invariants import offers
from harness.known_answer import FAMILIES
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES, DraftMethod
from harness.workloads.laws import DRAFT_METHODS, seeded_batch
from harness.workloads.scenarios import SCENARIOS
from harness.workloads.strategies import Batch, batches
from harness.workloads.vocabulary import Vocabulary
from suites.tiers import FULL

DRAWING = [name for name, spec in LANES.items() if spec.draws]


def draft_methods(*in_every_run: DraftMethod) -> list[Any]:
    """The same of the ways to draft, on the lanes that have them; the others are held to declining in
    `test_refusals`."""
    drawn = pytest.mark.drafters(*DRAWING)
    return [
        pytest.param(method, marks=[drawn] * (method == "probabilistic") + [FULL] * (method not in in_every_run))
        for method in DRAFT_METHODS
    ]


RecordExamples = Callable[[int], None]
MakeBatch = Callable[..., Batch]
"""A scenario: (vocabulary, seed = 0) -> batch."""

WALK = vocabulary("walk")
ROWS = vocabulary("census" if "census" in FAMILIES else "walk")
"""The family whose hidden rows tell most about where they come from."""

ANY_BATCH = batches(WALK, timed=True, least=2)
"""Mixed flags, any schedule; every other batch has arrivals and aborts."""

BARE_BATCH = batches(WALK, mixed=False)
"""No flags, any schedule: acceptance follows from prompt and cap alone."""


def watched(batch: Batch) -> Batch:
    """The batch with hidden states and logprobs of every request."""
    requests = tuple(
        replace(request, sampling=replace(request.sampling, logprobs=2), return_hidden_states=True)
        for request in batch.requests
    )
    return replace(batch, requests=requests)


ROW_BATCH = batches(ROWS, mixed=False).map(watched)
"""Any schedule, hidden states and logprobs of every request, in the family of telling rows."""


def offering(run: Run, *observations: str) -> Run:
    """Drop an example in which there is nothing to judge, such as drafts when every request ends with its prefill."""
    assume(offers(run).issuperset(observations))
    return run


def scenarios(
    lane: Lane,
    words: Vocabulary = WALK,
    makes: Iterable[MakeBatch] = tuple(SCENARIOS.values()),
    change: Callable[[Batch], Batch] = lambda batch: batch,
) -> Iterator[tuple[Batch, Run]]:
    """Each scenario, changed by `change`, and what came of it, with as many seeds as the lane was given."""
    for make in makes:
        for seed in range(lane.seeds):
            batch = change(make(words, seed))
            yield batch, lane.run_batch(batch, family=words.family)


def alone(lane: Lane, batch: Batch, request: Request, family: str = WALK.family) -> Run:
    """One request of the batch on an engine of its own, from its first step on."""
    solo = replace(request, arrival_step=0, abort_step=None)
    return lane.run_batch(replace(batch, requests=(solo,), changes=(), warm=False), family=family)


def capped(request: Request, max_new_tokens: int) -> Request:
    """The request with another length cap."""
    sampling = request.sampling
    least = min(sampling.min_new_tokens, max_new_tokens)
    return replace(request, sampling=replace(sampling, max_new_tokens=max_new_tokens, min_new_tokens=least))


LAW_IDS = (3, 7, 12)
"""Three tokens of the families "law"."""


def sampled_batch(lane: Lane, method: DraftMethod) -> Batch:
    """Requests of every kind that the engine claims, greedy ones among them; with seeds, where it knows any."""
    return seeded_batch(lane.claims(method), LAW_IDS)


def run_sampled(lane: Lane, batch: Batch, method: DraftMethod, **changes: Any) -> Run:
    """The batch in the family "law", in the set-up of the batch but for `changes`."""
    setup = {"family": "law", "draft_sample_method": method, "k": batch.k, "warm": batch.warm, **batch.setup}
    return lane.run(batch.requests, **{**setup, **changes})
