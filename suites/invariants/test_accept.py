"""ACCEPT-1 and ACCEPT-2: one accept length off, at one step of one request, is red at that step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.contract import EngineSetup, Run
from harness.invariants import Misuse, accept_1, accept_2, accept_2_drift
from suites.registration import suite

from .builders import ACCEPTS, Corruption, K, assert_red, completion, delta, good_run, request, step

suite(seconds=0.1, stage="cpu", needs="cpu")

WRONG: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("lower", completion("b", accept_lens=(2, 3)), "of verify step 1", {"row": 1, "step": 2, "expected": 4, "got": 3}),
    ("higher", completion("b", accept_lens=(4, 4)), "of verify step 0", {"row": 0, "step": 1, "got": 4}),
    ("more steps", completion("b", accept_lens=(2, 4, 1)), "number of verify steps", {"row": 2, "got": 3}),
    ("fewer steps", completion("b", accept_lens=(2,)), "number of verify steps", {"row": 1, "expected": 2}),
    ("cut by the finish", completion("b", accept_lens=(2, 3)), "of verify step 1", {"got": 3}),
    ("missing", completion("b", accept_lens=None), "missing", {}),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_accept_1_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert accept_1(good_run(), ACCEPTS) == []
    assert_red(accept_1(corrupt(good_run()), ACCEPTS), "ACCEPT-1", says, request_id="b", **where)


def test_accept_1_counts_drafts_where_it_is_told_how_many() -> None:
    run = good_run()
    drafted = {done.request_id: tuple(done.draft_lens or ()) for done in run.completions}
    assert accept_1(run, ACCEPTS, drafted) == []
    wrong = accept_1(completion("b", draft_lens=(3, 2))(run), ACCEPTS, drafted)
    assert_red(wrong, "ACCEPT-1", "number of drafts of verify step 1", request_id="b", row=1, step=2, expected=3, got=2)
    unknown = completion("b", draft_lens=None)(run)
    assert accept_1(unknown, ACCEPTS, drafted) == []
    with pytest.raises(Misuse, match="drafted has no entry for request 'b'"):
        accept_1(run, ACCEPTS, {"a": drafted["a"]})


def test_accept_1_does_not_need_a_trace() -> None:
    run = replace(completion("b", accept_lens=(2, 3))(good_run()), steps=())
    assert_red(accept_1(run, ACCEPTS), "ACCEPT-1", "of verify step 1", request_id="b", row=1, step=None)


def test_accept_1_takes_samples_by_name_and_aborted_requests_as_far_as_they_got() -> None:
    named = {"a": ACCEPTS["a"], "b#0": ACCEPTS["b"]}
    assert accept_1(good_run(), named) == []
    cut = completion("b", accept_lens=(2,), finish_reason="abort")(good_run())
    assert accept_1(cut, ACCEPTS) == []
    wrong = completion("b", accept_lens=(3,), finish_reason="abort")(good_run())
    assert_red(accept_1(wrong, ACCEPTS), "ACCEPT-1", "of verify step 0", request_id="b")


def test_accept_1_wants_an_expectation_for_every_request() -> None:
    with pytest.raises(Misuse, match="no entry for request 'b'"):
        accept_1(good_run(), {"a": [3, 1, 4]})


def perfect() -> Run:
    return good_run(accepts={"a": [4, 4], "b": [4, 4]})


def test_accept_2_wants_every_draft_of_a_perfect_drafter() -> None:
    assert accept_2(perfect(), full=True) == []
    off = completion("b", accept_lens=(4, 3))(perfect())
    assert_red(
        accept_2(off, full=True), "ACCEPT-2", "perfect drafter", request_id="b", row=1, step=2, expected=K + 1, got=3
    )


def test_accept_2_wants_nothing_of_a_hopeless_drafter() -> None:
    hopeless = good_run(accepts={"a": [1] * 7, "b": [1] * 5})
    assert accept_2(hopeless, full=False) == []
    off = completion("b", accept_lens=(1, 1, 2, 1, 1))(hopeless)
    assert_red(accept_2(off, full=False), "ACCEPT-2", "hopeless drafter", request_id="b", row=2, expected=1, got=2)


def test_accept_2_does_not_excuse_fewer_drafts_save_at_the_end_of_the_context() -> None:
    fewer = completion("b", accept_lens=(4, 3), draft_lens=(3, 2))(perfect())
    assert_red(accept_2(fewer, full=True), "ACCEPT-2", "perfect drafter", request_id="b", row=1)
    tight: EngineSetup = replace(fewer.setup, context_length=13)
    assert accept_2(replace(fewer, setup=tight), full=True) == []


def test_accept_2_wants_no_draft_for_a_last_token_where_none_is_claimed() -> None:
    """Of the six tokens of request b five are given before its last step; four where the first came with a step."""
    none = completion("b", accept_lens=(4, 1), draft_lens=(3, 0))(perfect())
    claims = replace(none.capabilities, drafts_for_last=False)
    assert accept_2(replace(none, capabilities=claims), full=True) == []
    for other in (none.capabilities, replace(claims, drafts_with_prefill=True)):
        found = accept_2(replace(none, capabilities=other), full=True)
        assert_red(found, "ACCEPT-2", "perfect drafter", request_id="b", row=1, expected=K + 1, got=1)


def test_accept_2_reports_missing_lengths_and_refuses_a_run_without_a_drafter() -> None:
    missing = completion("b", accept_lens=None)(perfect())
    assert_red(accept_2(missing, full=True), "ACCEPT-2", "missing", request_id="b")
    plain = replace(perfect(), setup=replace(perfect().setup, drafter=None))
    with pytest.raises(Misuse, match="must name a drafter"):
        accept_2(plain, full=True)


def test_drift_of_a_replayed_prompt_is_red_in_the_run_where_it_begins() -> None:
    first = good_run()
    assert accept_2_drift([first, first, first]) == []
    later = completion("b", accept_lens=(2, 2))(first)
    found = accept_2_drift([first, first, later])
    assert_red(found, "ACCEPT-2", "(this is run 2)", request_id="b", row=1, step=2, expected=4, got=2)
    gone = completion("b", accept_lens=None)(first)
    assert_red(accept_2_drift([first, gone]), "ACCEPT-2", "missing here or in the first", request_id="b")


def test_drift_by_position_ignores_where_blocks_begin() -> None:
    """A step without drafts moves the blocks; the drafter still errs at output token 4, whoever starts there."""
    pause = step(1, verify=None, propose=None)
    whole = good_run([request("a", (1, 2, 3))], {"a": [3, 1, 4]})
    other = pause(good_run([request("a", (1, 2, 3))], {"a": [1, 2, 1, 4]}))
    assert accept_2_drift([whole, other], by_position=True) == []
    assert_red(accept_2_drift([whole, other]), "ACCEPT-2", "of verify step 0", request_id="a")
    lame = pause(good_run([request("a", (1, 2, 3))], {"a": [1, 2, 2, 4]}))
    found = accept_2_drift([whole, lame], by_position=True)
    assert_red(found, "ACCEPT-2", "block at output token 4", request_id="a", step=3, expected=1, got=2)


def test_drift_by_position_skips_steps_that_drafted_other_numbers() -> None:
    whole = good_run([request("a", (1, 2, 3))], {"a": [3, 1, 4]})

    def fewer(verify: Any) -> Any:
        drafts = verify.draft_token_ids.clone()
        drafts[:, 1:] = -1
        return drafts

    halved = step(1, "verify", draft_token_ids=fewer, accept_lens=(1,))(whole)
    halved = delta(1, "a", token_ids=lambda d: d.token_ids[:1])(halved)
    assert accept_2_drift([whole, halved], by_position=True) == []


def test_drift_by_position_does_not_pass_for_want_of_a_common_place() -> None:
    whole = good_run([request("a", (1, 2, 3))], {"a": [3, 1, 4]})
    found = accept_2_drift([whole, delta(0, "a", token_ids=())(whole)], by_position=True)
    assert found
    silent = replace(whole, steps=())
    assert_red(accept_2_drift([whole, silent], by_position=True), "ACCEPT-2", "nothing tells whether it drifted")


def test_drift_refuses_series_that_show_nothing() -> None:
    with pytest.raises(Misuse, match="at least 2"):
        accept_2_drift([good_run()])
    with pytest.raises(Misuse, match="replay the same requests"):
        accept_2_drift([good_run([request("c", (1, 2, 3))], {"c": [4, 4]}), good_run()])
