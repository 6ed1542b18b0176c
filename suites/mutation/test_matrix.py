"""Each mutant is killed by an invariant that it names, nothing else is red, and nothing is red without a mutant."""

from __future__ import annotations

import pytest

from harness.mutants import Mutant, zoo
from harness.mutants.runs import Laboratory
from suites.registration import suite

suite(seconds=5.9, stage="cpu", needs="cpu")

FAST = ("hidden-rows-are-views",)
"""In every run; all of them with --tier full, or `draftproof mutants run`."""


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, id=one.id, marks=() if one.id in FAST else pytest.mark.full) for one in zoo().values()],
)
def test_killed(laboratory: Laboratory, mutant: Mutant, tier: str) -> None:
    (verdict,) = laboratory.run([mutant], others=1 if tier == "full" else 0)
    assert verdict.faults == (), verdict.trial


@pytest.mark.full
@pytest.mark.parametrize("where", sorted({one.lanes[0] for one in zoo().values()}))
def test_nothing_is_red_without_one(laboratory: Laboratory, where: str) -> None:
    (trial,) = laboratory.trials({where: laboratory.control([where], others=1)})
    assert (trial.red, trial.ended) == ((), "")
