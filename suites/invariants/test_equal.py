"""EQUAL-1 and EQUAL-2: the first difference is named, forgiven only inside the measured noise, and never hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.contract import HiddenStates, LogprobRow, Usage
from harness.invariants import Misuse, equal_1, equal_2
from harness.invariants.compare import same_logprob_row
from suites.registration import suite

from .builders import ACCEPTS, Corruption, assert_red, both, completion, good_run, request

suite(seconds=0.7, stage="cpu", needs="cpu")

LONGER = both(completion("b", token_ids=(11, 10, 5, 12, 15, 14, 9)), completion("b", usage=Usage(5, 7)))


def hidden_off(row: int, by: float) -> Corruption:
    """Move one decode row of b."""

    def change(done: Any) -> HiddenStates:
        decode = [values.clone() for values in done.hidden_states.decode]
        decode[row] += by
        return HiddenStates(done.hidden_states.prefill, tuple(decode))

    return completion("b", hidden_states=change)


def logprob_off(row: int, **changes: Any) -> Corruption:
    def change(done: Any) -> tuple[LogprobRow, ...]:
        return tuple(replace(entry, **changes) if i == row else entry for i, entry in enumerate(done.logprobs))

    return completion("b", logprobs=change)


DIFFERENT: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    (
        "token",
        completion("b", token_ids=(11, 10, 5, 12, 0, 14)),
        "tokens differ",
        {"row": 4, "position": 9, "expected": 15, "got": 0},
    ),
    ("short", completion("b", token_ids=(11, 10)), "tokens differ", {"row": 2, "expected": 5, "got": "the end"}),
    ("long", LONGER, "tokens differ", {"row": 6, "expected": "the end", "got": 9}),
    ("text", completion("b", text="lk"), "text differs", {"got": "lk"}),
    ("reason", completion("b", finish_reason="stop"), "finish_reason differs", {"expected": "length"}),
    ("usage", completion("b", usage=Usage(5, 7)), "usage.completion_tokens differs", {"expected": 6, "got": 7}),
    ("prompt usage", completion("b", usage=Usage(4, 6)), "usage.prompt_tokens differs", {"expected": 5}),
    ("hidden", hidden_off(1, 0.1), "hidden row differs", {"row": 6, "position": 6}),
    ("NaN", hidden_off(1, float("nan")), "hidden row differs", {"row": 6}),
    (
        "fewer hidden rows",
        completion("b", hidden_states=lambda d: HiddenStates(d.hidden_states.prefill, ())),
        "hidden rows differ in number",
        {"expected": 10, "got": 5},
    ),
    (
        "narrow rows",
        completion("b", hidden_states=HiddenStates(torch.zeros(5, 3), (torch.zeros(3),) * 5)),
        "hidden rows differ in width",
        {"row": 0, "expected": (18,), "got": (3,)},
    ),
    ("logprob", logprob_off(3, logprob=-0.4), "logprobs differ", {"row": 3, "position": 8}),
    ("NaN logprob", logprob_off(3, logprob=float("nan")), "logprobs differ", {"row": 3}),
    ("rank", logprob_off(3, rank=2), "logprobs differ", {"row": 3}),
    ("top", logprob_off(3, top=((3, -0.35), (9, -1.0))), "logprobs differ", {"row": 3}),
    ("fewer rows", completion("b", logprobs=lambda d: d.logprobs[:-1]), "rows differ in number", {"expected": 6}),
    (
        "prompt rows",
        completion("b", prompt_logprobs=lambda d: d.prompt_logprobs[:1] * 5),
        "prompt_logprobs",
        {"row": 1},
    ),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [c[1:] for c in DIFFERENT], ids=[case[0] for case in DIFFERENT])
@pytest.mark.parametrize("name", ["EQUAL-1", "EQUAL-2"])
def test_equal_is_red(name: str, corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    judge: Callable[..., Any] = equal_1 if name == "EQUAL-1" else equal_2
    assert judge(good_run(), good_run()) == []
    assert_red(judge(corrupt(good_run()), good_run()), name, says, request_id="b", **where)


@pytest.mark.parametrize("corrupt", [hidden_off(1, 1e-6), logprob_off(3, logprob=-0.35667), completion("b", text=None)])
def test_equal_1_is_green_inside_the_tolerance_and_where_one_run_lacks_a_part(corrupt: Corruption) -> None:
    assert equal_1(corrupt(good_run()), good_run()) == []


def test_ties_may_be_listed_and_ranked_either_way() -> None:
    tied = LogprobRow(3, -2.0, 1, ((3, -2.0), (4, -2.0)))
    assert same_logprob_row(LogprobRow(3, -2.0, 2, ((4, -2.0), (3, -2.0))), tied, 1e-5)
    assert same_logprob_row(LogprobRow(3, -2.0, 3, ((4, -2.0), (5, -2.0))), tied, 1e-5)
    assert not same_logprob_row(LogprobRow(3, -2.0, 1, ((3, -2.0), (5, -2.3))), tied, 1e-5)
    assert not same_logprob_row(LogprobRow(3, -2.0, 1, ((3, -2.0),)), tied, 1e-5)
    assert not same_logprob_row(LogprobRow(4, -2.0, 1, ((3, -2.0), (4, -2.0))), tied, 1e-5)
    assert not same_logprob_row(None, tied, 1e-5)


def replay(gap: float) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """A target that prefers 15 by `gap` over 0, and both over all others."""

    def scores(prefix: tuple[int, ...]) -> torch.Tensor:
        assert prefix == (4, 5, 6, 7, 8, 11, 10, 5, 12)
        values = torch.full((16,), -9.0, dtype=torch.bfloat16)
        values[15], values[0] = 0.0, -gap
        return values

    return scores


SWERVED = completion("b", token_ids=(11, 10, 5, 12, 0, 3), text="lkfmad", finish_reason="stop")


def test_equal_1_forgives_a_first_difference_inside_the_noise_and_what_follows_it() -> None:
    run = SWERVED(good_run())
    assert equal_1(run, good_run(), replay(0.125), noise=0.25) == []
    assert equal_1(run, good_run(), replay(0.25), noise=0.25) == []
    assert_red(equal_1(run, good_run(), replay(0.5), noise=0.25), "EQUAL-1", "0.5 below", request_id="b", row=4, got=0)


def test_equal_1_still_compares_what_came_before_a_forgiven_difference() -> None:
    run = both(SWERVED, hidden_off(1, 0.1))(good_run())
    assert_red(equal_1(run, good_run(), replay(0.125), noise=0.25), "EQUAL-1", "hidden row differs", row=6)
    run = both(SWERVED, hidden_off(4, 0.1))(good_run())
    assert equal_1(run, good_run(), replay(0.125), noise=0.25) == []


def test_equal_1_blames_the_control_arm_when_the_baseline_strayed() -> None:
    found = equal_1(good_run(), SWERVED(good_run()), replay(0.5), noise=0.25)
    assert_red(found, "EQUAL-1", "control arm fails", request_id="b", expected=15, got=0)


def test_equal_1_takes_no_excuse_from_nan_or_from_an_id_outside_the_vocabulary() -> None:
    def broken(_prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.full((16,), torch.nan)

    assert_red(equal_1(SWERVED(good_run()), good_run(), broken, noise=9.0), "EQUAL-1", "below", request_id="b")
    outside = completion("b", token_ids=(11, 10, 5, 12, 16, 3))(good_run())
    assert_red(equal_1(outside, good_run(), replay(0.1), noise=9.0), "EQUAL-1", "inf below", request_id="b", got=16)


def test_equal_1_never_forgives_a_missing_token() -> None:
    short = completion("b", token_ids=(11, 10, 5, 12))(good_run())
    assert_red(equal_1(short, good_run(), replay(0.1), noise=9.0), "EQUAL-1", "tokens differ", got="the end")


def test_a_missing_baseline_answer_is_a_fault_of_the_baseline() -> None:
    lame = replace(good_run(), completions=good_run().completions[:1])
    assert_red(equal_1(good_run(), lame), "EQUAL-1", "baseline: no completion", request_id="b")


def test_equal_refuses_runs_that_cannot_be_compared() -> None:
    alone = good_run([request("a", (1, 2, 3))], ACCEPTS)
    with pytest.raises(Misuse, match="no request 'b'"):
        equal_1(good_run(), alone)
    with pytest.raises(Misuse, match="another prompt"):
        equal_1(good_run([request("a", (1, 2, 4))], ACCEPTS), alone)
    with pytest.raises(Misuse, match="no request to compare"):
        equal_2(good_run([request("c", (1, 2, 4))], {"c": [4, 4]}), alone)
    sampled = good_run([request("a", (1, 2, 3), temperature=1.0)], ACCEPTS)
    with pytest.raises(Misuse, match="no request to compare"):
        equal_1(sampled, sampled)


def test_equal_2_compares_common_requests_and_accept_lens_when_asked() -> None:
    alone = good_run([request("a", (1, 2, 3))], {"a": [1, 4, 4]})
    assert equal_2(good_run(), alone) == []
    found = equal_2(good_run(), alone, accept_lens=True, name="solo run")
    assert_red(found, "EQUAL-2", "accept_lens differ from the solo run", request_id="a", row=0, expected=(1, 4, 4))


def test_equal_2_compares_seeded_requests_when_asked() -> None:
    seeded = good_run([request("a", (1, 2, 3), temperature=1.0, seed=7)], ACCEPTS)
    other = completion("a", token_ids=(2, 2, 2))(seeded)
    assert_red(equal_2(other, seeded, seeded=True), "EQUAL-2", "tokens differ", request_id="a", row=1)
