"""STATE-1: a stale, foreign, shifted or missing row of KV or draft input is red at its layer and position. STATE-2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.contract import StateSnapshot
from harness.invariants import Misuse, state_1, state_2
from harness.invariants.trace import is_known, key_of
from suites.registration import suite

from .builders import Corruption, assert_red, fresh, good_run, request, rows, snapshot, step

suite(seconds=0.3, stage="cpu", needs="cpu")


def edited(field: str, change: Callable[[torch.Tensor], Any]) -> Corruption:
    """Change a clone of one tensor of the snapshot of b after step 1 (7 tokens are committed then, 2 accepted)."""
    return snapshot(1, "b", **{field: lambda state: change(getattr(state, field).clone())})


def put(index: tuple[Any, ...], value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return change


def shift(tensor: torch.Tensor) -> torch.Tensor:
    tensor[3:, 1, 0] = tensor[2:-1, 1, 0].clone()
    return tensor


FOREIGN = fresh((1, 2, 3, 2, 13, 4, 7)).target_kv
FOREIGN_STATE = fresh((1, 2, 3, 2, 13, 4, 7)).recurrent_state

BROKEN: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("draft K", edited("draft_kv", put((4, 0, 0), 7.0)), "draft_kv, layer 0, K", {"position": 4, "step": 1}),
    ("target V", edited("target_kv", put((2, 1, 1), 7.0)), "target_kv, layer 1, V", {"position": 2, "row": 2}),
    (
        "NaN",
        edited("target_kv", put((6, 0, 0), torch.nan)),
        "target_kv, layer 0, K",
        {"position": 6, "origin": "NaN: unwritten or freed memory"},
    ),
    (
        "foreign",
        edited("target_kv", put((5, 1, 0), FOREIGN[3, 1, 0])),
        "target_kv, layer 1, K",
        {"position": 5, "origin": "this is row 3 of 'a'"},
    ),
    (
        "shifted",
        edited("target_kv", shift),
        "more rows",
        {"position": 3, "origin": "this is row 2 of the same request"},
    ),
    (
        "one row short",
        edited("draft_kv", lambda kv: kv[:-1]),
        "draft_kv has not the shape",
        {"expected": [7, 1, 2, 1, 2], "got": [6, 1, 2, 1, 2]},
    ),
    ("rejected rows kept", edited("target_kv", lambda kv: torch.cat([kv, kv[:2]])), "target_kv has not", {"step": 1}),
    ("no draft KV", snapshot(1, "b", draft_kv=None), "draft_kv has not", {"got": "None"}),
    ("fed too little", edited("draft_input_ids", lambda ids: ids[:-1]), "draft_input_ids has not", {"got": [6]}),
    ("fed id", edited("draft_input_ids", put((5,), 3)), "draft_input_ids", {"position": 5, "got": "[0] 3"}),
    ("fed row", edited("draft_features", put((1,), 0.5)), "draft_features", {"position": 1, "origin": None}),
    (
        "state not rolled back",
        edited("recurrent_state", put((0, 1), 5.0)),
        "recurrent_state, layer 0, head 1",
        {"position": 6, "row": 1, "step": 1, "origin": None},
    ),
    (
        "foreign state",
        snapshot(1, "b", recurrent_state=FOREIGN_STATE),
        "recurrent_state, layer 0, head 0",
        {"origin": "this is the state of another one, which begins (1, 2, 3, 2), after 6 tokens (expected: 7)"},
    ),
    (
        "stale state",
        snapshot(1, "b", recurrent_state=fresh((4, 5, 6, 7, 8, 11)).recurrent_state),
        "recurrent_state, layer 0, head 0",
        {"origin": "this is the state of the same request after 5 tokens (expected: 7)"},
    ),
    (
        "lost state",
        edited("recurrent_state", torch.zeros_like),
        "recurrent_state, layer 0, head 0",
        {"origin": "zero: the state before the first token"},
    ),
    ("no state", snapshot(1, "b", recurrent_state=None), "recurrent_state has not", {"got": "None"}),
    (
        "committed",
        snapshot(1, "b", token_ids=(4, 5, 6, 7, 8, 11, 10, 9)),
        "committed tokens of the engine",
        {"position": 7, "expected": 5, "got": 9},
    ),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_state_1_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert state_1(good_run(), fresh) == []
    assert_red(state_1(corrupt(good_run()), fresh), "STATE-1", says, request_id="b", **where)


def test_state_1_asks_once_for_each_token_sequence() -> None:
    asked: list[tuple[int, ...]] = []

    def counting(tokens: tuple[int, ...]) -> StateSnapshot:
        asked.append(tokens)
        return fresh(tokens)

    assert state_1(good_run(), counting) == []
    assert len(asked) == len(set(asked)) == 5


def test_an_owner_is_a_request_before_it_is_a_sample() -> None:
    run = good_run([request("x#1", (1, 2)), request("x", (3, 4), n=3)], {"x#1": [4, 4], "x": [4, 4]})
    assert [key_of(run, owner) for owner in ("x#1", "x#2", "x", "y")] == [("x#1", 0), ("x", 2), ("x", 0), ("y", 0)]
    assert [is_known(run, key) for key in (("x", 2), ("x", 3), ("y", 0))] == [True, False, False]


def test_state_1_knows_owners_by_sample_and_reports_strangers() -> None:
    assert state_1(snapshot(1, "b", owner="b#0")(good_run()), fresh) == []
    assert_red(state_1(snapshot(1, "b", owner="z")(good_run()), fresh), "STATE-1", "unknown owner", step=1, got="z")


def test_state_1_refuses_a_fresh_state_of_the_wrong_form() -> None:
    flat = snapshot(0, "a", target_kv=torch.zeros(3, 4))(good_run())
    with pytest.raises(Misuse, match=r"must be \[rows, layers, 2, kv_heads, head_dim\]"):
        state_1(flat, lambda tokens: replace(fresh(tokens), target_kv=torch.zeros(3, 4)))


def test_state_1_forgives_rounding_of_values_and_nothing_in_ids() -> None:
    rounded = edited("draft_features", put((1,), rows((4, 5))[1] * (1 + 1e-6)))(good_run())
    assert state_1(rounded, fresh) == []
    large = snapshot(1, "b", draft_input_ids=lambda state: state.draft_input_ids.double() + 1e-6)(good_run())
    assert_red(state_1(large, fresh), "STATE-1", "draft_input_ids", request_id="b", position=0)


AUX: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("none of them", step(0, aux_hidden_rows=(0, 2)), "kind 'extend'", {"step": 0, "expected": 2, "got": 0}),
    ("last chunk only", step(0, aux_hidden_rows=(1, 2)), "kind 'extend'", {"step": 0, "got": 1}),
    ("path forgot", step(2, aux_hidden_rows=None), "the target ran", {"step": 2}),
    ("nonsense", step(2, aux_hidden_rows=(3,)), "is not (rows collected", {"step": 2}),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in AUX], ids=[case[0] for case in AUX])
def test_state_2_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert state_2(good_run()) == []
    assert_red(state_2(corrupt(good_run())), "STATE-2", says, **where)
