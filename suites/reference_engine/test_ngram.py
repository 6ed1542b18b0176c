"""Prompt lookup on the device against one over tuples, and what NGRAM cannot do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.contract import Refused
from harness.engines import engine_factory
from harness.known_answer.drafters import ngram as closed_form
from reference_engine import SpecConfig
from reference_engine.drafters.ngram import look_up
from reference_engine.pool import PLACEHOLDER
from suites.reference_engine.conftest import OpenLane
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@settings(max_examples=100)
@given(
    batch=st.lists(TOKENS, min_size=1, max_size=4),
    shortest=st.integers(1, 4),
    more=st.integers(0, 3),
    k=st.integers(0, 5),
    spare=st.integers(0, 3),
)
def test_lookup_is_that_over_tuples(batch: list[list[int]], shortest: int, more: int, k: int, spare: int) -> None:
    """Ragged rows, and behind their ends what an earlier tenant left: it must be neither matched nor drafted."""
    width = max(map(len, batch)) + spare
    # The first token again and again, which would be a match, or the draft behind one.
    tokens = torch.tensor([(row + row[:1] * width)[:width] for row in batch])
    drafts = look_up(tokens, torch.tensor([len(row) for row in batch]), shortest, shortest + more, k)
    assert drafts.shape == (len(batch), k)
    for row, got in zip(batch, drafts.tolist(), strict=True):
        right = closed_form.look_up(row, k, shortest, shortest + more)
        assert got == [*right, *[PLACEHOLDER] * (k - len(right))]


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"topk": 2, "num_draft_tokens": 5}, "topk=2: NGRAM drafts chains only"),
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method='probabilistic': .*NGRAM must use 'greedy'"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min=0: must lie in 1..prompt_lookup_max"),
        ({"prompt_lookup_min": 4}, r"prompt_lookup_min=4: must lie in 1..prompt_lookup_max \(3\)"),
    ],
)
def test_what_it_cannot_do_is_refused(open_lane: OpenLane, changes: dict[str, Any], pattern: str) -> None:
    setup = open_lane("NGRAM").setup()
    assert setup.drafter is not None
    with pytest.raises(Refused, match=pattern):
        engine_factory("reference").start(replace(setup, drafter=replace(setup.drafter, **changes)))


def test_a_checkpoint_is_refused(open_lane: OpenLane) -> None:
    setup = open_lane("NGRAM").setup()
    assert setup.drafter is not None
    with pytest.raises(Refused, match=r"model='.*target': NGRAM has no checkpoint"):
        engine_factory("reference").start(replace(setup, drafter=replace(setup.drafter, model=setup.target)))


def test_the_window_is_vllms_by_default() -> None:
    spec = SpecConfig(method="NGRAM", num_steps=3, num_draft_tokens=4)
    assert (spec.prompt_lookup_min, spec.prompt_lookup_max) == (5, 5)
