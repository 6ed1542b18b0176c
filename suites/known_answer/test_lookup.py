"""Drafters without a checkpoint: their closed forms by hand, and workloads that make them right, wrong and silent."""

from __future__ import annotations

from itertools import repeat

import pytest

from harness.contract import Capabilities
from harness.known_answer.drafters.ngram import look_up
from harness.workloads.acceptance import verify_steps
from harness.workloads.known import known_family, vocabulary
from harness.workloads.scenarios import repeats
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

CLAIMS = Capabilities(engine="any", version="", drafters=frozenset(), features=frozenset())


@pytest.mark.parametrize(
    ("tokens", "window", "drafts"),
    [
        ((1, 2, 3), (1, 3), ()),
        ((7,), (1, 3), ()),
        ((1, 2, 3, 1), (1, 3), (2, 3, 1)),
        ((1, 2, 3, 1), (2, 3), ()),
        ((5, 1, 8, 1, 9, 1), (1, 3), (8, 1, 9)),  # of several occurrences the first
        ((5, 1, 8, 2, 1, 9, 2, 1), (1, 3), (9, 2, 1)),  # a longer one before an earlier one
        ((4, 2, 1, 6, 3, 2, 1, 7, 3, 2, 1), (1, 2), (6, 3, 2)),  # but no longer than allowed
        ((4, 4), (1, 3), (4,)),  # nothing is drafted past the end
        ((4, 4, 4), (1, 3), (4,)),  # occurrences may overlap the end
        ((1, 2, 1, 2), (1, 3), (1, 2)),
    ],
)
def test_lookup_by_hand(tokens: tuple[int, ...], window: tuple[int, int], drafts: tuple[int, ...]) -> None:
    assert look_up(tokens, 3, *window) == drafts


@pytest.mark.parametrize("k", [1, 3, 5])
def test_repeats_are_drafted_right_wrong_and_not_at_all(k: int) -> None:
    """What `test_texts_that_repeat` runs: every accept length; no, some and all drafts; ragged over each batch."""
    steps = []
    for family in ("walk", "census-stutter"):
        drafter = known_family(family).drafter("ngram")
        runs = [
            verify_steps(drafter, request.prompt_token_ids, request.sampling.max_new_tokens, repeat(k), CLAIMS)
            for request in repeats(vocabulary(family)).requests
        ]
        assert any(len({step.accept_len for step in together}) > 1 for together in zip(*runs, strict=False))
        steps += [step for run in runs for step in run]
    assert {step.accept_len for step in steps} == set(range(1, k + 2))
    assert {step.drafted for step in steps} >= {0, 1, k}
    kinds = {(0 < step.drafted < k, step.accept_len - 1 == step.drafted > 0) for step in steps}
    assert len(kinds) == (4 if k > 1 else 2)
