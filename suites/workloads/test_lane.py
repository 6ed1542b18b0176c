"""A lane asks an engine for what it claims with the lane's drafter, and for nothing else."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from harness.contract import Refused, SamplingParams
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane, fit_request
from harness.workloads.lanes import LANES
from harness.workloads.scenarios import mixed_flags
from suites.registration import suite

suite(seconds=0.6, stage="cpu", needs="cpu")

FLAGGED = mixed_flags(vocabulary("walk")).requests
EVERYTHING = frozenset(field.name for field in fields(SamplingParams)) | {"return_hidden_states"}


@pytest.mark.parametrize("claimed", [frozenset(), frozenset({"logprobs", "seed"}), EVERYTHING])
def test_what_is_not_claimed_is_not_asked_for(claimed: frozenset[str]) -> None:
    plain = SamplingParams()
    for request in FLAGGED:
        fitted = fit_request(request, claimed)
        for field in fields(SamplingParams):
            keeps = field.name in claimed or field.name == "max_new_tokens"
            right = getattr(request.sampling if keeps else plain, field.name)
            assert getattr(fitted.sampling, field.name) == right, field.name


@pytest.mark.parametrize(("name", "claims_stop"), [("none", True), ("STANDALONE", False), ("EAGLE", True)])
def test_claims_are_those_with_the_drafter_where_it_is_taken(tmp_path: Path, name: str, claims_stop: bool) -> None:
    lane = Lane("transformers", LANES[name], tmp_path)
    assert ("stop" in lane.capabilities.features) == claims_stop
    lane.needs("stop_token_ids")
    if not claims_stop:
        with pytest.raises(Refused, match=f"stop: engine=transformers does not claim it on the lane {name}"):
            lane.needs("stop_token_ids", "stop")
