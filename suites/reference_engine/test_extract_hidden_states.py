"""EXTRACT_HIDDEN_STATES: what it drafts from sampled tokens of one and two columns, what it keeps, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.contract import Refused, Request, Run, SamplingParams
from harness.engines import engine_factory
from harness.invariants import alias_1_layers, check
from suites.reference_engine.conftest import OpenLane
from suites.reference_engine.support import ask, run
from suites.registration import suite

suite(seconds=0.7, stage="cpu", needs="cpu")

LANE, FAMILY = "EXTRACT", "census-stutter"


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"num_steps": 2, "num_draft_tokens": 3}, "num_steps=2: EXTRACT_HIDDEN_STATES drafts one token"),
        ({"topk": 2, "num_draft_tokens": 3}, "topk=2: EXTRACT_HIDDEN_STATES drafts chains only"),
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method='probabilistic': .*must use 'greedy'"),
        ({"aux_layer_ids": ()}, r"aux_layer_ids=\(\): must name distinct layers in 0\.\.4"),
        ({"aux_layer_ids": (1, 1)}, r"aux_layer_ids=\(1, 1\): must name distinct layers"),
        ({"aux_layer_ids": (0, 5)}, r"aux_layer_ids=\(0, 5\): must name distinct layers in 0\.\.4"),
        ({"aux_layer_ids": (-1,)}, r"aux_layer_ids=\(-1,\): must name distinct layers"),
    ],
)
def test_what_it_cannot_do_is_refused(open_lane: OpenLane, changes: dict[str, Any], pattern: str) -> None:
    setup = open_lane(LANE).setup()
    assert setup.drafter is not None
    with pytest.raises(Refused, match=pattern):
        engine_factory("reference").start(replace(setup, drafter=replace(setup.drafter, **changes)))


def test_a_checkpoint_is_refused(open_lane: OpenLane) -> None:
    setup = open_lane(LANE).setup()
    assert setup.drafter is not None
    with pytest.raises(Refused, match=r"model='.*target': EXTRACT_HIDDEN_STATES has no checkpoint"):
        engine_factory("reference").start(replace(setup, drafter=replace(setup.drafter, model=setup.target)))


def stuttering(open_lane: OpenLane, **changes: Any) -> tuple[Run, list[Request]]:
    target = open_lane(LANE).target(FAMILY)
    requests = [ask(f"r{i}", target.prompt(3 + i, i, owner=i), max_new_tokens=24) for i in range(4)]
    return run(open_lane(LANE).setup(family=FAMILY, **changes), requests), requests


def test_the_draft_is_the_last_token_of_one_or_two_sampled_columns(open_lane: OpenLane) -> None:
    """Of an accepted draft and its bonus token it is the bonus; behind a rejected one there is a hole."""
    observed, _ = stuttering(open_lane)
    seen = set()
    for before, after in zip(observed.steps, observed.steps[1:], strict=False):
        if before.verify is None or before.propose is None or after.verify is None:
            continue
        emitted = dict(zip(before.verify.request_ids, before.verify.emitted.tolist(), strict=True))
        for owner, (draft,) in zip(after.verify.request_ids, after.verify.draft_token_ids.tolist(), strict=True):
            tokens = [token for token in emitted[owner] if token >= 0]
            assert draft == tokens[-1]
            seen.add((len(tokens), len(set(tokens))))
    assert seen >= {(1, 1), (2, 2)}


@pytest.mark.parametrize("layers", [(0,), (3, 1, 2, 0, 4)])
def test_any_layers_in_any_order(open_lane: OpenLane, layers: tuple[int, ...]) -> None:
    lane = open_lane(LANE)
    setup = lane.setup(family=FAMILY, overlap=True)
    assert setup.drafter is not None
    observed = run(replace(setup, drafter=replace(setup.drafter, aux_layer_ids=layers)), stuttering(open_lane)[1])
    target = lane.target(FAMILY)
    check(alias_1_layers(observed, lambda tokens: target.layer_states(tokens, layers)))


def test_an_aborted_request_has_the_rows_of_what_was_computed(open_lane: OpenLane) -> None:
    """Aborted while it prefills it has none; later it has all rows but that of its last token."""
    lane = open_lane(LANE)
    target = lane.target(FAMILY)
    requests = [
        Request(
            request_id=f"r{step}",
            prompt_token_ids=target.prompt(7, step),
            sampling=SamplingParams(max_new_tokens=9),
            abort_step=step,
        )
        for step in (1, 4)
    ]
    for request in requests:
        observed = lane.run([request], family=FAMILY, chunk_size=4)
        done = observed.of(request.request_id)
        assert (done.layer_states is not None) == bool(done.token_ids) == (request.abort_step == 4)
        check(alias_1_layers(observed, lane.layer_states(FAMILY)))
