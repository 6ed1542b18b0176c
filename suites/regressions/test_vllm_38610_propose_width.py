"""vLLM PR #38610: a drafter's `propose` handed the sampled tokens back as its drafts.

Its method drafted one token, so it returned what it was given, the sampled tokens: [N, 1] as long as each request
samples one token a step. Once drafts are accepted there is a second sampled column, and the runner's [N, 1] buffer
cannot take an [N, 2] tensor. The tests of the day only ever gave it one column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
import torch

from harness.contract import ProposeTrace, Run, StepTrace, TensorFacts
from harness.engines.reference import ReferenceEngine
from harness.invariants import alias_2, judge, shape_1
from harness.workloads.lane import Lane
from reference_engine.drafters import DRAFTERS as METHODS
from reference_engine.drafters.base import Drafter, Proposal, ProposeInputs
from suites.registration import suite
from suites.regressions.support import asking, crash, family_of, lanes, observe

suite(seconds=0.8, stage="cpu", needs="cpu")


def plant(monkeypatch: pytest.MonkeyPatch, *, first_column: bool = False) -> None:
    """`propose` ingests as it should and then returns the sampled tokens, or a view of their first column."""

    def planted(original: Callable[[Drafter, ProposeInputs], Proposal]) -> Callable[[Drafter, ProposeInputs], Proposal]:
        def propose(self: Drafter, inputs: ProposeInputs) -> Proposal:
            proposal = original(self, inputs)
            sampled = inputs.sampled_token_ids
            return Proposal(sampled[:, :1] if first_column else sampled, proposal.parents, proposal.probs)

        return propose

    methods = [method for method in METHODS.values() if isinstance(method, type)]
    for owner in {next(cls for cls in method.__mro__ if "propose" in vars(cls)) for method in methods}:
        monkeypatch.setattr(owner, "propose", planted(owner.propose))


class Probe:
    """Drives the drafter of a running engine by hand: the state of a real decode step, sampled tokens of any width."""

    def __init__(self, drafter: Drafter, inputs: ProposeInputs) -> None:
        self.drafter = drafter
        self.inputs = inputs
        self.steps: list[StepTrace] = []

    @torch.no_grad()
    def propose(self, sampled: torch.Tensor, discard: torch.Tensor | None = None) -> torch.Tensor:
        """`sampled` [N, w], -1 padded; `discard` [N] marks requests that are still prefilling."""
        rows = len(sampled)
        inputs = replace(self.inputs, sampled_token_ids=sampled)
        if discard is not None:
            inputs = replace(inputs, discard=discard, all_discarded=bool(discard.all()))
        drafts = self.drafter.propose(inputs).token_ids
        trace = ProposeTrace(
            request_ids=tuple(f"{request_id}#0" for request_id in inputs.request_ids[:rows]),
            k=inputs.num_drafts,
            sampled_width=sampled.shape[1],
            discarded=tuple(inputs.discard.tolist()),
            token_ids=drafts.clone(),
            facts=TensorFacts.of(drafts),
            sampled=TensorFacts.of(sampled),
        )
        self.steps.append(StepTrace(step=len(self.steps), kind="decode", propose=trace))
        return drafts


def probe(lane: Lane, k: int) -> tuple[Run, Probe]:
    """A run, and a probe at its second decode step of all four requests."""
    requests = asking(lane, [9] * 4)
    calls = count()
    with lane.start(family=family_of(lane), k=k) as engine:
        assert isinstance(engine, ReferenceEngine)
        drafter = engine.engine.drafter
        assert drafter is not None
        seen: list[ProposeInputs] = []
        original = drafter.propose

        def watch(inputs: ProposeInputs) -> Proposal:
            if next(calls) == 2:
                seen.append(inputs)
            return original(inputs)

        drafter.propose = watch  # type: ignore[method-assign]
        run = engine.run(requests, max_steps=3)
        del drafter.propose
    return run, Probe(drafter, seen[0])


def drive(run: Run, by_hand: Probe) -> Run:
    """Every width 1..k + 1, with ragged rows, rows without a sampled token, and discarded ones."""
    assert run.setup.drafter is not None
    inputs = by_hand.inputs
    rows = len(inputs.rows)
    last = inputs.history[inputs.rows, inputs.seq_lens - 1]
    by_hand.steps.clear()
    for width in range(1, run.setup.drafter.num_steps + 2):
        full = last[:, None].repeat(1, width)
        lengths = torch.arange(rows) % (width + 1)
        ragged = torch.where(torch.arange(width) < lengths[:, None], full, -1)
        by_hand.propose(full)
        by_hand.propose(ragged)
        by_hand.propose(ragged, lengths == 0)
        by_hand.propose(torch.full_like(full, -1), torch.ones(rows, dtype=torch.bool))
    return replace(run, steps=tuple(by_hand.steps))


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.full), 3])
def test_the_width_of_the_sampled_tokens_comes_back(drafter: Lane, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red at every width but one, which is why one width proves nothing."""
    run, by_hand = probe(drafter, k)
    assert shape_1(drive(run, by_hand)) == []
    plant(monkeypatch)
    driven = drive(run, by_hand)
    proposes = {step.step: step.propose for step in driven.steps if step.propose is not None}
    red = {violation.step for violation in shape_1(driven)}
    assert red == {step for step, propose in proposes.items() if propose.sampled_width != propose.k}
    assert red


def test_the_runner_cannot_take_the_second_column(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """What users saw: the prefill step works, the first decode step ends the engine."""
    requests = asking(drafter, [9] * 4)
    k = 1 if drafter.spec.topk == 1 else 2  # two children of the root are as many drafts as two sampled columns
    assert judge(observe(drafter, requests, k=k)) == []
    plant(monkeypatch)
    message = crash(drafter, requests, k=k)
    assert message is not None
    assert "shape mismatch" in message


@pytest.mark.parametrize("drafter", lanes(lambda spec: spec.topk == 1), indirect=True)
def test_one_column_of_the_sampled_tokens_is_still_their_memory(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mend by slicing has the right shape, but drafts that live in the sampled tokens change with them (ALIAS-2).

    A tree has more than one draft even at one step, so one column has the wrong shape.
    """
    plant(monkeypatch, first_column=True)
    run = observe(drafter, asking(drafter, [9] * 4), k=1)
    assert shape_1(run) == []
    assert alias_2(run)


def test_drafts_do_not_depend_on_the_width(drafter: Lane) -> None:
    """The same last token in one column or in k + 1 with unused ones behind it: the same drafts."""
    k = 2
    _, by_hand = probe(drafter, k)
    inputs = by_hand.inputs
    last = inputs.history[inputs.rows, inputs.seq_lens - 1][:, None]
    narrow = by_hand.propose(last).clone()
    for width in range(2, k + 2):
        for place in range(width):
            wide = torch.full((len(last), width), -1)
            wide[:, : place + 1] = 5
            wide[:, place] = last[:, 0]
            assert torch.equal(by_hand.propose(wide), narrow)
