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
from harness.known_answer import Drafter
from harness.workloads.lane import Lane
from reference_engine.batch import StepResult
from reference_engine.output import OutputProcessor
from reference_engine.request import RequestOutput, RequestState
from suites.regressions.support import FAMILY, asking, long_enough, misattributed, observe, owners


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


def overruns(drafter: Drafter, request: Request, k: int) -> bool:
    """Whether the last block has tokens behind the cap; of a perfect drafter every cap but 1 + a multiple of k + 1."""
    cap = request.sampling.max_new_tokens
    if not drafter.guesses:
        return (cap - 1) % (k + 1) > 0
    return 1 + sum(drafter.accept_lens(request.prompt_token_ids, cap, k)) > cap


def overran(done: Completion) -> int:
    """Tokens that the last block had behind the end."""
    return 1 + sum(done.accept_lens or ()) - len(done.token_ids)


@pytest.mark.parametrize(("k", "overlap"), [(1, False), (3, True)])
def test_caps_inside_the_last_block(drafter: Lane, k: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cap modulo k + 1, with a perfect drafter, so that blocks end at 1 + a multiple of k + 1."""
    family = f"{FAMILY}-perfect"
    requests = asking(drafter, [4 + extra for extra in range(k + 1)])
    setup = {"family": family, "k": k, "overlap": overlap}
    right = observe(drafter, requests, **setup)
    assert judge(right) + misattributed(drafter, right) == []

    plant(monkeypatch)
    run = observe(drafter, requests, **setup)
    cut = {done.request_id for done in run.completions if overran(done)}
    assert owners(count_1(run)) == cut
    if drafter.spec.topk == 1:  # the best nodes of a tree need not hold a path of full length
        assert cut == {r.request_id for r in requests if overruns(drafter.drafter(family), r, k)}


def test_stops_inside_a_block(drafter: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop at each place of a block of four."""
    family = f"{FAMILY}-perfect"
    requests = []
    for place, request in enumerate(asking(drafter, long_enough(drafter, [12] * 4)), 3):
        stop = stop_in_a_block(drafter.drafter(family), request, place)
        requests.append(replace(request, sampling=replace(request.sampling, stop_token_ids=(stop,))))
    setup = {"family": family, "k": 3, "overlap": True}
    right = observe(drafter, requests, **setup)
    assert judge(right) + misattributed(drafter, right) == []
    assert {done.finish_reason for done in right.completions} == {"stop"}

    plant(monkeypatch)
    run = observe(drafter, requests, **setup)
    cut = {done.request_id for done in run.completions if overran(done)}
    assert len(cut) >= 2
    assert owners(count_1(run)) == cut


def stop_in_a_block(drafter: Drafter, request: Request, earliest: int) -> int:
    """The first token of the output from place `earliest` on that has not come before; where the drafter guesses, and
    blocks end anywhere, one with something of its block behind it."""
    cap = request.sampling.max_new_tokens
    stream = drafter.target.greedy(request.prompt_token_ids, cap)
    lens = drafter.accept_lens(request.prompt_token_ids, cap, 3)
    ends = set(accumulate(lens)) if drafter.guesses else set()
    return next(t for i, t in enumerate(stream) if i >= earliest and i not in ends and t not in stream[:i])
