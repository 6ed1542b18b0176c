"""SCHED: a disturbed neighbour, a request that never ends and a flag that leaks are red with the request named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.contract import Run, StepTrace
from harness.invariants import Misuse, sched_1, sched_2, sched_2_first, sched_3
from suites.registration import suite

from .builders import ACCEPTS, Corruption, assert_red, both, completion, delta, good_run, request, step, two_requests

suite(seconds=0.2, stage="cpu", needs="cpu")


def without_a() -> Run:
    return good_run([two_requests()[1]])


def aborting_a(tokens: int) -> Run:
    """The good run, in which a was aborted at step 2 after so many tokens."""
    run = completion("a", token_ids=lambda d: d.token_ids[:tokens], finish_reason="abort")(good_run())
    changed = tuple(replace(r, abort_step=2) if r.request_id == "a" else r for r in run.requests)
    return replace(run, requests=changed)


@pytest.mark.parametrize("other", [without_a(), aborting_a(4), aborting_a(1), good_run()])
def test_sched_1_compares_the_others(other: Run) -> None:
    assert sched_1(other, good_run()) == []
    hurt = completion("b", token_ids=(11, 10, 5, 12, 0, 14))(other)
    assert_red(sched_1(hurt, good_run()), "SCHED-1", "tokens differ", request_id="b", row=4, expected=15, got=0)


def test_sched_1_wants_what_an_aborted_request_got_to_be_right() -> None:
    wrong = completion("a", token_ids=(2, 13, 5))(aborting_a(3))
    assert_red(sched_1(wrong, good_run()), "SCHED-1", "tokens differ", request_id="a", row=2, expected=4, got=5)
    assert sched_1(wrong, good_run(), disturbed={"a"}) == []


def test_sched_1_compares_accept_lens_when_asked() -> None:
    slower = completion("b", accept_lens=(1, 1, 1, 1, 1))(without_a())
    assert sched_1(slower, good_run()) == []
    found = sched_1(slower, good_run(), accept_lens=True)
    assert_red(found, "SCHED-1", "accept_lens differ", request_id="b", expected=(2, 4))


def busy(steps: int) -> Corruption:
    """More steps that run the target after the last finish."""

    def apply(run: Run) -> Run:
        last = run.steps[-1].step
        more = tuple(StepTrace(step=last + 1 + i, kind="decode", target_forwards=1) for i in range(steps))
        return replace(run, steps=run.steps + more)

    return apply


def without_deltas(run: Run) -> Run:
    return replace(run, steps=tuple(replace(s, deltas=()) for s in run.steps))


STUCK: list[tuple[str, Corruption, int, str, dict[str, Any]]] = [
    ("late", lambda run: run, 2, "more steps than the bound", {"request_id": "a", "step": 3, "got": 3}),
    ("late, black box", without_deltas, 2, "the run took more steps", {"expected": 2, "got": 4}),
    (
        "never",
        lambda run: replace(run, idle=False, completions=run.completions[:1]),
        9,
        "a hang or a livelock",
        {"got": ["b"]},
    ),
    ("lost", lambda run: replace(run, completions=run.completions[:1]), 9, "no completion", {"request_id": "b"}),
    ("computes on", busy(2), 9, "computes on", {"step": 6, "got": "2 steps"}),
]


@pytest.mark.parametrize(("corrupt", "bound", "says", "where"), [case[1:] for case in STUCK], ids=[c[0] for c in STUCK])
def test_sched_2_is_red(corrupt: Corruption, bound: int, says: str, where: dict[str, Any]) -> None:
    assert sched_2(good_run(), 4) == []
    assert sched_2(busy(1)(good_run()), 9) == []
    assert_red(sched_2(corrupt(good_run()), bound), "SCHED-2", says, **where)


def test_sched_2_counts_from_the_arrival_and_ends_aborted_requests_soon() -> None:
    run = good_run()
    later = replace(run, requests=tuple(replace(r, arrival_step=2) for r in run.requests))
    assert sched_2(later, 1) == []
    aborted = replace(run, requests=(replace(run.requests[0], abort_step=0), run.requests[1]))
    assert_red(sched_2(aborted, 9), "SCHED-2", "aborted request went on", request_id="a", step=3)


def solo(request_id: str) -> Run:
    return good_run([r for r in two_requests() if r.request_id == request_id])


SOLOS = {"a": solo("a"), "b": solo("b")}

MIXED: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("token", completion("b", token_ids=(11, 10, 5, 12, 0, 14)), "tokens differ from the solo run", {"row": 4}),
    ("flag lost", completion("b", hidden_states=None), "hidden_states is given in only one", {"got": "not given"}),
    ("logprobs lost", completion("b", logprobs=None), "logprobs is given in only one", {"expected": "given"}),
    ("missing", lambda run: replace(run, completions=run.completions[:1]), "no completion", {}),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in MIXED], ids=[case[0] for case in MIXED])
def test_sched_3_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert sched_3(good_run(), SOLOS) == []
    assert_red(sched_3(corrupt(good_run()), SOLOS), "SCHED-3", says, request_id="b", **where)


def test_sched_3_sees_a_flag_that_leaked_to_a_neighbour() -> None:
    bare = completion("b", logprobs=None)(solo("b"))
    found = sched_3(good_run(), {"a": solo("a"), "b": bare})
    assert_red(found, "SCHED-3", "logprobs is given in only one", request_id="b", expected="not given", got="given")


def test_sched_3_sees_what_steps_bring_to_one_who_did_not_ask() -> None:
    """A completion may have hidden it since."""
    alone = solo("b")
    told = [s.step for s in alone.steps if any(d.request_id == "b" for d in s.deltas)]
    for name, nothing in (("logprobs", ()), ("prefill_hidden", None), ("decode_hidden", ())):
        silent = both(*(delta(number, "b", **{name: nothing}) for number in told))(alone)
        found = sched_3(good_run(), {"a": solo("a"), "b": silent})
        assert_red(found, "SCHED-3", f"steps deliver {name} in only one", request_id="b", expected=False, got=True)


def test_sched_3_compares_accept_lens_when_asked() -> None:
    slow = both(completion("b", accept_lens=(1, 1)), delta(1, "b", finished=False), step(0, preempted=()))(good_run())
    assert_red(sched_3(slow, SOLOS, accept_lens=True), "SCHED-3", "accept_lens differ", request_id="b")


def test_sched_3_skips_unseeded_requests_and_wants_a_solo_run_for_the_others() -> None:
    sampled = good_run([two_requests()[0], request("b", (4, 5, 6, 7, 8), temperature=1.0)], ACCEPTS | {"b": [4, 4]})
    assert sched_3(sampled, {"a": solo("a")}) == []
    with pytest.raises(Misuse, match="no run for request 'b'"):
        sched_3(good_run(), {"a": solo("a")})


def test_sched_2_sees_a_step_that_computes_nothing() -> None:
    run = good_run()
    first, second, *rest = run.steps
    idle = StepTrace(step=second.step, kind="idle", pages=first.pages)
    late = tuple(replace(later, step=later.step + 1) for later in (second, *rest))
    stalled = replace(run, steps=(first, idle, *late))
    assert sched_2(run, 20) == []
    assert_red(sched_2(stalled, 20), "SCHED-2", "computes nothing", step=idle.step)
    assert sched_2(replace(stalled, setup=replace(run.setup, overlap=True)), 20) == []


def test_sched_2_sees_a_first_token_that_comes_late() -> None:
    run = good_run()
    assert sched_2_first(run, 0) == []
    late = replace(run, steps=tuple(replace(step, step=step.step + 3) for step in run.steps))
    assert sched_2_first(late, 3) == []
    assert_red(sched_2_first(late, 2), "SCHED-2", "came too late", expected="at most 2", got=3)
