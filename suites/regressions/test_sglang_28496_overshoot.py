"""SGLang PR #28496, second part: hidden rows of the tokens behind the end.

Once every accepted row was kept (#26163), a block that ran past the length cap or past a stop gave more rows than
tokens: the output ids were cut to the finished length, the hidden states were not.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from harness.contract import Completion, Request
from harness.invariants import count_1, judge
from harness.workloads.lane import Lane
from reference_engine.batch import StepResult
from reference_engine.output import OutputProcessor
from reference_engine.request import RequestOutput, RequestState
from suites.registration import suite
from suites.regressions.support import (
    asking,
    census,
    errs,
    family_of,
    lanes,
    long_enough,
    misattributed,
    observe,
    owners,
)

suite(seconds=1.5, stage="cpu", needs="cpu")


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


def block_ends(lane: Lane, request: Request, k: int) -> set[int]:
    """Lengths of the output at which a block of a chain of k ends; the last is not cut by the cap."""
    cap = request.sampling.max_new_tokens
    lens = lane.drafter(perfect(lane)).accept_lens(request.prompt_token_ids, cap, min(k, lane.spec.max_k or k))
    return set(accumulate(lens, initial=1))


def overran(done: Completion) -> int:
    """Tokens that the last block had behind the end."""
    return 1 + sum(done.accept_lens or ()) - len(done.token_ids)


@pytest.mark.parametrize(("k", "overlap"), [pytest.param(1, False, marks=pytest.mark.full), (3, True)])
def test_caps_inside_the_last_block(drafter: Lane, k: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cap modulo k + 1, with a perfect drafter, so that blocks end at 1 + a multiple of k + 1; where the drafter
    errs, and they end anywhere, every other cap is moved on until it lies inside a block."""
    family = perfect(drafter)
    caps = [4 + extra for extra in range(k + 1)]
    if errs(drafter):
        longer = asking(drafter, [40] * len(caps))
        caps[::2] = [min({*range(caps[i], 40)} - block_ends(drafter, longer[i], k)) for i in range(0, k + 1, 2)]
    requests = asking(drafter, caps)
    setup = {"family": family, "k": k, "overlap": overlap}
    right = observe(drafter, requests, **setup)
    assert judge(right) + misattributed(drafter, right) == []

    plant(monkeypatch)
    run = observe(drafter, requests, **setup)
    cut = {done.request_id for done in run.completions if overran(done)}
    assert owners(count_1(run)) == cut != set()
    if drafter.spec.topk == 1:  # the best nodes of a tree need not hold a path of full length
        assert cut == {r.request_id for r in requests if r.sampling.max_new_tokens not in block_ends(drafter, r, k)}


@pytest.mark.parametrize("drafter", lanes(lambda spec: spec.max_k != 1), indirect=True)
def test_stops_inside_a_block(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop at each place of a block of four, or where the drafter errs, with something of its block behind it.

    EXTRACT drafts the token that came last again, which would have stopped the request already.
    """
    requests: list[Request] = []
    for i, request in enumerate(asking(drafter, long_enough(drafter, [12] * 8))):
        stops = stops_in_a_block(drafter, request, earliest=3 + i % 4)
        if stops and len(requests) < 4:
            requests.append(replace(request, sampling=replace(request.sampling, stop_token_ids=stops[:1])))
    setup = {"family": perfect(drafter), "k": 3, "overlap": True}
    right = observe(drafter, requests, **setup)
    assert judge(right) + misattributed(drafter, right) == []
    assert {done.finish_reason for done in right.completions} == {"stop"}

    plant(monkeypatch)
    run = observe(drafter, requests, **setup)
    cut = {done.request_id for done in run.completions if overran(done)}
    assert len(cut) >= 2
    assert owners(count_1(run)) == cut


def stops_in_a_block(lane: Lane, request: Request, earliest: int) -> tuple[int, ...]:
    """Tokens of the output, from place `earliest` on, that have not come before; where the drafter errs, and blocks end
    anywhere, those with something of their block behind them. Of text that was looked up most has been said before, and
    there may be none."""
    stream = census(lane).greedy(request.prompt_token_ids, request.sampling.max_new_tokens)
    ends = block_ends(lane, request, 3) if errs(lane) else set()
    places = range(earliest, len(stream))
    return tuple(stream[i] for i in places if i + 1 not in ends and stream[i] not in stream[:i])
