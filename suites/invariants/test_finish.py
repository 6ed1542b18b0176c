"""FINISH-1 and FINISH-2: junk after a stop, wrong reasons, wrong caps and wrong cuts are red with their place named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.contract import Request, Run, Usage
from harness.invariants import Misuse, finish_1, finish_1_alone, finish_2, finish_2_alone, finish_2_minimum
from suites.registration import suite

from .builders import ACCEPTS, Corruption, assert_red, both, completion, follower, good_run, request, step, text_of

suite(seconds=0.5, stage="cpu", needs="cpu")

# a: prompt 1 2 3, then 2 13 4 7 6 1 8 11; b: prompt 4 5 6 7 8, then 11 10 5 12 15 14.
A = (2, 13, 4, 7, 6, 1, 8, 11)
B = (11, 10, 5, 12, 15, 14)
EOS = (9,)


def ended(tokens: tuple[int, ...], reason: str = "stop", text: str | None = None) -> Corruption:
    """Request b came to these tokens."""
    return completion(
        "b", token_ids=tokens, finish_reason=reason, usage=Usage(5, len(tokens)), text=text or text_of(tokens)
    )


def asked(**sampling: Any) -> Corruption:
    """Request b asked for something else."""

    def apply(run: Run) -> Run:
        changed = tuple(
            replace(r, sampling=replace(r.sampling, **sampling)) if r.request_id == "b" else r for r in run.requests
        )
        return replace(run, requests=changed)

    return apply


def test_the_walk_is_what_the_tables_say() -> None:
    run = good_run()
    assert (run.of("a").token_ids, run.of("b").token_ids) == (A, B)
    assert follower(B[-1]) == 9


STOPS: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("junk after a stop id", asked(stop_token_ids=(5,)), "tokens follow the first stop", {"row": 3, "position": 8}),
    ("junk after EOS", ended((11, 9, 5), "length"), "tokens follow the first stop", {"row": 2, "got": (5,)}),
    (
        "length masks stop",
        both(asked(stop_token_ids=(14,)), ended(B, "length")),
        "the last token completes a stop",
        {"expected": "stop", "got": "length"},
    ),
    ("stop for nothing", ended(B, "stop"), "does not end in a stop", {"got": 14}),
    ("stop at half the cap", ended(B[:3], "stop"), "does not end in a stop", {"got": 5}),
    ("too short", ended(B[:4], "length"), "there was room for more", {"expected": 6, "got": 4}),
    ("too long", ended((*B, 3), "length"), "more tokens than max_new_tokens", {"row": 6, "got": 7}),
    (
        "past the context",
        lambda run: replace(run, setup=replace(run.setup, context_length=10)),
        "more tokens than the context",
        {"row": 5, "expected": "at most 5"},
    ),
    (
        "not quite full",
        lambda run: replace(ended(B[:4], "length")(run), setup=replace(run.setup, context_length=11)),
        "there was room for more",
        {"got": 4},
    ),
    ("nothing", ended((), "stop", ""), "finished without a token", {}),
    ("abort", ended(B[:4], "abort"), "nobody aborted", {}),
    ("stop string in the text", both(asked(stop=("fm",)), ended(B[:4])), "the text holds a stop string", {}),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in STOPS], ids=[case[0] for case in STOPS])
def test_finish_1_alone_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert finish_1_alone(good_run(), EOS) == []
    assert_red(finish_1_alone(corrupt(good_run()), EOS), "FINISH-1", says, request_id="b", **where)


FINE: list[tuple[str, Corruption]] = [
    ("EOS as last token", ended((11, 10, 9))),
    ("stop id on the cap", both(asked(stop_token_ids=(14,)), ended(B))),
    ("ignored EOS in the middle", both(asked(ignore_eos=True), ended((11, 9, 5, 9, 15, 14), "length"))),
    ("stop id wins over ignored EOS", both(asked(ignore_eos=True, stop_token_ids=(9,)), ended((11, 9)))),
    ("context is full", lambda run: replace(ended(B[:4], "length")(run), setup=replace(run.setup, context_length=10))),
    ("stop string, text unknown to us", both(asked(stop=("fm",)), ended(B[:4], text="lk"))),
]


@pytest.mark.parametrize("corrupt", [case[1] for case in FINE], ids=[case[0] for case in FINE])
def test_finish_1_alone_is_green(corrupt: Corruption) -> None:
    run = corrupt(good_run())
    assert [violation for violation in finish_1_alone(run, EOS) if violation.request_id == "b"] == []


def test_finish_1_knows_an_engine_that_bans_an_ignored_eos() -> None:
    run = both(asked(ignore_eos=True), ended((11, 9, 5, 12, 15, 14), "length"))(good_run())
    banning = replace(run, capabilities=replace(run.capabilities, ignore_eos="ban"))
    assert_red(finish_1_alone(banning, EOS), "FINISH-1", "bans the end-of-sequence", request_id="b", row=1, got=9)


# The stop string "fm" is completed by token 12, the fourth of b (text "lkfm").
STRINGS: list[tuple[str, Corruption, str]] = [
    ("cut too late", ended(B[:4], text="lkf"), "cut before the first stop string"),
    ("went on", ended(B[:5], text="lk"), "tokens follow the one that completed"),
    ("length", both(asked(max_new_tokens=4), ended(B[:4], "length", text="lk")), "completes a stop"),
    ("stop without the string", ended(B[:3]), "does not end in a stop"),
]


@pytest.mark.parametrize(("corrupt", "says"), [case[1:] for case in STRINGS], ids=[case[0] for case in STRINGS])
def test_finish_1_follows_stop_strings_across_tokens(corrupt: Corruption, says: str) -> None:
    words = asked(stop=("zz", "fm"))
    assert finish_1_alone(both(words, ended(B[:4], text="lk"))(good_run()), EOS, text_of) == []
    assert_red(finish_1_alone(both(words, corrupt)(good_run()), EOS, text_of), "FINISH-1", says, request_id="b")


def test_a_stop_string_within_min_new_tokens_does_not_count() -> None:
    words = asked(stop=("fm",), min_new_tokens=4)
    assert finish_1_alone(words(good_run()), EOS, text_of) == []
    early = both(words, ended(B[:4], text="lk"))(good_run())
    assert_red(finish_1_alone(early, EOS, text_of), "FINISH-1", "does not end in a stop", request_id="b")


def test_a_stop_id_that_the_text_leaves_out_completes_no_stop_string() -> None:
    """Token 12 is a stop id, and the end of the stop string "fm"."""
    words = asked(stop=("fm",), stop_token_ids=(12,))
    for text, in_text in (("lk", True), ("lkf", False)):
        run = both(words, ended(B[:4], text=text))(good_run())
        for claim in (True, False):
            claimed = replace(run, capabilities=replace(run.capabilities, stop_ids_in_text=claim))
            found = finish_1_alone(claimed, EOS, text_of)
            if claim == in_text:
                assert found == []
            else:
                assert_red(found, "FINISH-1", "cut before the first stop string", request_id="b", got=text)


BASELINE: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("token", ended((11, 10, 5, 12, 15, 3), "length"), "tokens differ", {"row": 5, "position": 10, "expected": 14}),
    ("short", ended(B[:3], "length"), "tokens differ", {"row": 3, "expected": 12, "got": "the end"}),
    ("reason", completion("b", finish_reason="stop"), "finish_reason differs", {"expected": "length", "got": "stop"}),
    ("text", completion("b", text="lkfm"), "text differs", {}),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in BASELINE], ids=[c[0] for c in BASELINE])
def test_finish_1_is_red_against_a_baseline(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert finish_1(good_run(), good_run(), EOS) == []
    assert_red(finish_1(corrupt(good_run()), good_run(), EOS), "FINISH-1", says, request_id="b", **where)


def capped(cap: int) -> Run:
    """The same two requests, b with another cap."""
    pair: tuple[Request, ...] = (request("a", (1, 2, 3)), request("b", (4, 5, 6, 7, 8), max_new_tokens=cap))
    return good_run(pair, {"a": ACCEPTS["a"], "b": [2, 4, 4, 4]})


@pytest.mark.parametrize("short", [1, 2, 3, 4, 5, 6])
def test_finish_2_is_green_for_every_cap(short: int) -> None:
    assert finish_2(capped(short), capped(6), EOS) == []


def longer() -> Run:
    return both(
        asked(max_new_tokens=9), completion("b", token_ids=(*B, 9), finish_reason="stop", text=text_of((*B, 9)))
    )(good_run())


PREFIX: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("other token", ended((11, 10, 5, 12, 14, 15), "length"), "not the prefix", {"row": 4, "expected": 15}),
    ("stopped short", ended(B[:4], "length"), "not the prefix", {"row": 4, "expected": 15, "got": "the end"}),
    ("overshoot", ended((*B, 9), "stop"), "not the prefix", {"row": 6, "expected": "the end", "got": 9}),
    ("reason", completion("b", finish_reason="stop"), "finish reason", {"expected": "length", "got": "stop"}),
    ("text", completion("b", text="lkfmx"), "not the beginning", {}),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in PREFIX], ids=[case[0] for case in PREFIX])
def test_finish_2_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert finish_2(good_run(), longer(), EOS) == []
    assert_red(finish_2(corrupt(good_run()), longer(), EOS), "FINISH-2", says, request_id="b", **where)


def test_finish_2_wants_a_stop_on_the_cap_to_be_a_stop() -> None:
    exact = both(asked(max_new_tokens=7), ended((*B, 9), "length"))(good_run())
    assert_red(finish_2(exact, longer(), EOS), "FINISH-2", "finish reason", request_id="b", expected="stop")


MASKS: list[dict[str, Any]] = [
    {"regex": "lkfm~"},
    {"json_schema": "{}"},
    {"allowed_token_ids": (11, 10, 5, 12)},
    {"bad_words": ((9,),)},
    {"logit_bias": ((3, -float("inf")),)},
]


@pytest.mark.parametrize("masks", MASKS, ids=str)
def test_masks_may_leave_nothing(masks: dict[str, Any]) -> None:
    """Then the engine alone can end the request; a cap on the last token comes first."""
    dry = both(asked(**masks, max_new_tokens=9), ended(B[:4], "abort"))(good_run())
    assert finish_1_alone(dry, EOS) == []
    for cap, reason in ((3, "length"), (4, "length"), (5, "abort")):
        short = both(asked(**masks, max_new_tokens=cap), ended(B[: min(cap, 4)], reason))(good_run())
        assert finish_2(short, dry, EOS) == []
        other = completion("b", finish_reason="abort" if reason == "length" else "length")(short)
        assert_red(finish_2(other, dry, EOS), "FINISH-2", "finish reason", request_id="b", expected=reason)


def test_finish_2_refuses_runs_in_the_wrong_order() -> None:
    with pytest.raises(Misuse, match="swap the runs"):
        finish_2(longer(), good_run())


MINIMUM: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("EOS too early", ended((11, 9)), "stop id was emitted before min_new_tokens", {"row": 1, "position": 6, "got": 9}),
    ("one row too late", ended((11, 10, 9)), "stop id was emitted before min_new_tokens", {"row": 2}),
    ("too short", ended((11, 10), "length"), "finished before min_new_tokens", {"expected": "at least 3", "got": 2}),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in MINIMUM], ids=[c[0] for c in MINIMUM])
def test_finish_2_alone_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    least = asked(min_new_tokens=3)
    assert finish_2_alone(both(least, ended((11, 10, 5, 9)))(good_run()), EOS) == []
    assert finish_2_alone(both(least, ended((11, 10, 5)))(good_run()), EOS) == []
    assert_red(finish_2_alone(both(least, corrupt)(good_run()), EOS), "FINISH-2", says, request_id="b", **where)


FREE = both(asked(stop_token_ids=(5,)), ended(B[:3]))
"""Without a minimum request b stops at its third token."""


@pytest.mark.parametrize(
    ("least", "corrupt", "says", "where"),
    [
        (2, ended(B, "length"), "changes an output that is longer", {"row": 3, "position": 8, "expected": "the end"}),
        (1, ended((11, 10, 12)), "changes an output that is longer", {"row": 2, "expected": 5, "got": 12}),
        (2, ended(B[:3], "length"), "changes the finish reason", {"expected": "stop", "got": "length"}),
    ],
)
def test_finish_2_minimum_is_red(least: int, corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    """A minimum that bans a row too many, or reaches where it must not."""
    free = FREE(good_run())
    asking = both(FREE, asked(min_new_tokens=least))(good_run())
    assert finish_2_minimum(asking, free, EOS) == []
    assert_red(finish_2_minimum(corrupt(asking), free, EOS), "FINISH-2", says, request_id="b", **where)


def test_a_minimum_that_bans_a_stop_changes_the_output() -> None:
    other = both(FREE, asked(min_new_tokens=3), ended((11, 10, 12, 7), "length"))(good_run())
    assert finish_2_minimum(other, FREE(good_run()), EOS) == []
    with pytest.raises(Misuse, match="the run without"):
        finish_2_minimum(other, other, EOS)


def test_a_full_context_ends_a_request_before_its_minimum() -> None:
    full = both(asked(min_new_tokens=5), ended(B[:3], "length"))(good_run())
    full = replace(full, setup=replace(full.setup, context_length=9))
    assert finish_2_alone(full, EOS) == []
    stopped = completion("b", finish_reason="stop")(full)
    assert_red(finish_2_alone(stopped, EOS), "FINISH-2", "finished before min_new_tokens", request_id="b", got=3)


def test_finish_rules_hold_for_a_run_without_traces() -> None:
    assert finish_1_alone(step(0, deltas=())(good_run()), EOS) == []
