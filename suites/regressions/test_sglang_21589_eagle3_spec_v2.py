"""SGLang #21589: the spec V2 worker crashed with EAGLE3 where V1 had worked.

Two things were lost in the rewrite. V1 had turned off the target's logprob request before the draft's own pass; V2 left
it on, so the draft pass answered it with positions that were the target's. And one of the branches that prune a
prefill to the rows somebody wants never collected the auxiliary hidden states that EAGLE3 drafts from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.contract import Run
from harness.engines.reference import ReferenceEngine
from harness.invariants import Violation, check, count_1, judge, logp_1, state_1, state_2
from harness.workloads.lane import Lane
from reference_engine.batch import Batch, StepResult
from reference_engine.drafters.base import Drafting, ProposeInputs
from reference_engine.model.causal_lm import CausalLM
from reference_engine.output import OutputProcessor
from reference_engine.request import RequestState
from reference_engine.runner import Runner
from reference_engine.sampling.logprobs import compute_logprobs
from suites.registration import suite
from suites.regressions.support import asking, census, crash, family_of, lanes, misattributed, observe, owners

suite(seconds=1.8, stage="cpu", needs="cpu")

CAPS = (7, 6, 5, 4)
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def leave_the_flag_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's pass answers the target's logprob request: for every token that the target's step emitted, out of
    logits that are the drafter's, one row a request and over its own vocabulary."""
    original = Runner._propose

    def propose(self: Runner, result: StepResult, *args: Any) -> None:
        wanted = [r.sampling.logprobs for r in result.batch.requests if r.sampling.logprobs is not None]
        drafter: Any = self.drafter
        ingest = drafter.ingest

        def flagged(inputs: ProposeInputs, next_token_ids: torch.Tensor) -> Drafting:
            drafting: Drafting = ingest(inputs, next_token_ids)
            if wanted:
                compute_logprobs(drafting.logits[:, None], inputs.sampled_token_ids, max(wanted))
            return drafting

        drafter.ingest = flagged
        original(self, result, *args)
        del drafter.ingest

    monkeypatch.setattr(Runner, "_propose", propose)


def in_prefills(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[RequestState], bool], forward: Forward) -> None:
    """The target's forward becomes `forward` in prefills of a batch in which any request is `wanted`."""
    original = Runner._extend

    def extend(self: Runner, batch: Batch) -> StepResult:
        with monkeypatch.context() as branch:
            if any(wanted(request) for request in batch.requests):
                branch.setattr(CausalLM, "forward", forward)
            return original(self, batch)

    monkeypatch.setattr(Runner, "_extend", extend)


def fill_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch for logprobs of the prompt forgets its list of auxiliary states, and concatenates it all the same."""
    original = CausalLM.forward

    def forward(self: CausalLM, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, aux = original(self, *args)
        collected: list[torch.Tensor] = []
        return hidden, None if aux is None else torch.cat(collected, dim=-1)

    in_prefills(monkeypatch, lambda request: request.sampling.prompt_logprobs is not None, forward)


def keep_the_last_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pruned branch collects the last row of each prefill, and what the drafter needs is stretched to the rest."""
    original_forward, original_propose = CausalLM.forward, Runner._propose

    def forward(self: CausalLM, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, aux = original_forward(self, *args)
        return hidden, None if aux is None else aux[:, -1:]

    def propose(self: Runner, result: StepResult, *args: Any) -> None:
        sampling, rows, token_ids, positions, num_rows, hidden, *rest = args
        if result.batch.kind == "extend":
            hidden = hidden[:, -1:].expand(-1, token_ids.shape[1], -1)
        original_propose(self, result, sampling, rows, token_ids, positions, num_rows, hidden, *rest)

    in_prefills(monkeypatch, lambda request: not request.needs_all_prompt_rows, forward)
    monkeypatch.setattr(Runner, "_propose", propose)


def deliver_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pruned branch is taken although somebody wants the rows of the prompt."""
    original = OutputProcessor._collect_prompt

    def collect(self: OutputProcessor, result: StepResult, index: int, request: RequestState) -> None:
        before = len(request.prefill_hidden)
        original(self, result, index, request)
        request.prefill_hidden[before:] = [rows[-1:] for rows in request.prefill_hidden[before:]]

    monkeypatch.setattr(OutputProcessor, "_collect_prompt", collect)


def stale(lane: Lane, run: Run) -> list[Violation]:
    """STATE-1 against fresh engines without the bug."""
    with lane.start(family=family_of(lane)) as engine:
        assert isinstance(engine, ReferenceEngine)
        return state_1(run, engine.fresh_state)


FLAGS: tuple[dict[str, int], ...] = ({}, {"logprobs": 1}, {"prompt_logprobs": 1}, {"logprobs": 0, "prompt_logprobs": 0})


@pytest.mark.parametrize("rows", [False, pytest.param(True, marks=pytest.mark.full)], ids=["pruned", "all rows"])
def test_without_the_bug_every_flag_works(drafter: Lane, rows: bool) -> None:
    """Logprobs of prompt and output in every combination, chunk by chunk under overlap scheduling."""
    requests = [asking(drafter, CAPS, return_hidden_states=rows, **flags)[i] for i, flags in enumerate(FLAGS)]
    run = observe(drafter, requests, overlap=True, chunk_size=4)
    check(judge(run) + logp_1(run, census(drafter).logprobs))
    if drafter.spec.aux:
        assert state_2(run) == []


@pytest.mark.parametrize("drafter", lanes(lambda spec: spec.may_equal_target), indirect=True)
def test_a_draft_pass_that_answers_the_targets_logprob_request(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request that wants logprobs ends the engine for all; without any, nothing shows.

    NGRAM and EXTRACT have no pass of their own, and no logits.
    """
    leave_the_flag_on(monkeypatch)
    silent = asking(drafter, CAPS)
    check(judge(observe(drafter, silent, overlap=True)))
    asked = (*silent[:3], *asking(drafter, CAPS, logprobs=1)[3:])
    message = crash(drafter, asked, overlap=True)
    assert message is not None
    assert "token_ids.shape" in message


@pytest.mark.parametrize("drafter", lanes(lambda spec: spec.aux), indirect=True)
def test_a_branch_that_never_fills_its_list(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """The crash came only with a drafter that reads auxiliary states, when somebody wanted logprobs of the prompt."""
    fill_no_list(monkeypatch)
    check(judge(observe(drafter, asking(drafter, CAPS, logprobs=1))))
    message = crash(drafter, asking(drafter, CAPS, prompt_logprobs=1))
    assert message is not None
    assert "non-empty list" in message


HARMED: dict[str, set[str]] = {"STANDALONE": set(), "NGRAM": set(), "MEDUSA": {"r0"}, "FROZEN_KV_MTP": {"r0"}}
"""Who is fed other rows than the right ones, where that is not everybody."""


def test_a_pruned_prefill_that_feeds_the_drafter_its_last_rows(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """No crash and the right tokens: STATE-2 counts the rows, STATE-1 sees what every feature drafter was fed.

    STANDALONE and NGRAM read no rows of the target, so they are none the worse. MEDUSA and FROZEN_KV_MTP read but the
    last, and are given the wrong one only where another prompt of the batch is longer.
    """
    requests = asking(drafter, CAPS[-2:], return_hidden_states=False)
    right = observe(drafter, requests, snapshots=True)
    assert judge(right) + stale(drafter, right) == []
    with monkeypatch.context() as planted:
        keep_the_last_rows(planted)
        run = observe(drafter, requests, snapshots=True)
    assert [done.token_ids for done in run.completions] == [done.token_ids for done in right.completions]
    assert {violation.invariant for violation in judge(run)} == ({"STATE-2"} if drafter.spec.aux else set())
    fed = [violation for violation in stale(drafter, run) if violation.message.startswith("draft_features")]
    assert owners(fed) == HARMED.get(drafter.spec.name, {"r0", "r1"})


def test_a_pruned_prefill_where_the_rows_are_wanted(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of the prompt instead of all of them: COUNT-1, and ALIAS-1 says which row it is."""
    requests = asking(drafter, CAPS)
    deliver_the_last_row(monkeypatch)
    run = observe(drafter, requests)
    assert owners(count_1(run)) == {"r0", "r1", "r2", "r3"}
    assert any("of the same request" in (violation.origin or "") for violation in misattributed(drafter, run))
