"""SGLang PR #28496, second part: hidden rows of the tokens behind the end.

Once every accepted row was kept (#26163), a block that ran past the length cap or past a stop gave more rows than
tokens: the output ids were cut to the finished length, the hidden states were not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.contract import Completion
from harness.invariants import count_1, judge
from harness.workloads.lane import Lane
from reference_engine.batch import StepResult
from reference_engine.output import OutputProcessor
from reference_engine.request import RequestOutput, RequestState
from suites.regressions.support import WITH_MODEL, asking, census, family_of, misattributed, observe, owners


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    original = OutputProcessor._output

    def output(
        self: OutputProcessor,
        result: StepResult,
        index: int,
        request: RequestState,
        tokens: list[int],
        path: list[int] | None,
        first: bool,
    ) -> RequestOutput:
        right = original(self, result, index, request, tokens, path, first)
        if path is None or not request.return_hidden_states:
            return right
        window = index * result.stride
        accepted = [window + node for node in path if node >= 0]
        return replace(right, decode_hidden=tuple(result.hidden[row].clone() for row in accepted))

    monkeypatch.setattr(OutputProcessor, "_output", output)


def perfect(lane: Lane) -> str:
    """The family of a drafter that is always right, where there can be one."""
    return f"{family_of(lane)}-perfect" if lane.spec.may_equal_target else family_of(lane)


def overran(done: Completion) -> int:
    """Tokens that the last block had behind the end."""
    return 1 + sum(done.accept_lens or ()) - len(done.token_ids)


@pytest.mark.parametrize(("k", "overlap"), [(1, False), (3, True)])
def test_caps_inside_the_last_block(drafter: Lane, k: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cap modulo k + 1, with a perfect drafter, so that blocks end at 1 + a multiple of k + 1."""
    family = perfect(drafter)
    requests = asking(drafter, [4 + extra for extra in range(k + 1)])
    setup = {"family": family, "k": k, "overlap": overlap}
    right = observe(drafter, requests, **setup)
    assert judge(right) + misattributed(drafter, right) == []

    plant(monkeypatch)
    run = observe(drafter, requests, **setup)
    cut = {done.request_id for done in run.completions if overran(done)}
    assert owners(count_1(run)) == cut
    if (
        drafter.spec.topk == 1 and drafter.spec.may_equal_target
    ):  # the best nodes of a tree need not hold a path of full length
        assert cut == {r.request_id for r in requests if (r.sampling.max_new_tokens - 1) % (k + 1)}


@pytest.mark.parametrize("drafter", WITH_MODEL, indirect=True)
def test_stops_inside_a_block(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop at each place of a block of four. What is drafted from the text has mostly been said, and so not stopped,
    before."""
    plain = asking(drafter, [12] * 4)
    streams = [census(drafter).greedy(request.prompt_token_ids, 12) for request in plain]
    requests = [
        replace(request, sampling=replace(request.sampling, stop_token_ids=(first_seen(stream, 3 + i),)))
        for i, (request, stream) in enumerate(zip(plain, streams, strict=True))
    ]
    setup = {"family": perfect(drafter), "k": 3, "overlap": True}
    right = observe(drafter, requests, **setup)
    assert judge(right) + misattributed(drafter, right) == []
    assert {done.finish_reason for done in right.completions} == {"stop"}

    plant(monkeypatch)
    run = observe(drafter, requests, **setup)
    cut = {done.request_id for done in run.completions if overran(done)}
    assert len(cut) >= 2
    assert owners(count_1(run)) == cut


def first_seen(stream: tuple[int, ...], earliest: int) -> int:
    """The first token from place `earliest` on that has not come before."""
    return next(token for place, token in enumerate(stream) if place >= earliest and token not in stream[:place])
