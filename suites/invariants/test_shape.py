"""SHAPE-1 and SHAPE-2: every wrong width, dtype, id and slot is red at its step and row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.contract import Action, DrafterSetup, ProposeTrace, Run, TensorFacts
from harness.invariants import shape_1, shape_2
from suites.registration import suite

from .builders import VOCAB, Corruption, K, assert_red, completion, delta, good_run, step

suite(seconds=0.4, stage="cpu", needs="cpu")


def proposal(tensor: torch.Tensor, **changes: Any) -> Corruption:
    return step(1, "propose", token_ids=tensor, facts=TensorFacts.of(tensor), **changes)


def proposal_alone(rows: int, k: int, width: int, tensor: torch.Tensor) -> Run:
    """A run whose only trace is one call of `propose`."""
    run = good_run()
    trace = ProposeTrace(
        request_ids=("a", "b")[:rows],
        k=k,
        sampled_width=width,
        discarded=(False,) * rows,
        token_ids=tensor,
        facts=TensorFacts.of(tensor),
    )
    return replace(run, steps=(replace(run.steps[0], propose=trace),))


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize(("k", "width"), [(0, 1), (1, 1), (1, 2), (2, 3), (3, 1), (3, 4)])
def test_shape_1_is_green_for_every_width(rows: int, k: int, width: int) -> None:
    assert shape_1(proposal_alone(rows, k, width, torch.zeros(rows, k, dtype=torch.int32))) == []


@pytest.mark.parametrize("shape", [(2, 2), (2,), (2, 0), (1, 1), (2, 1, 1)])
def test_shape_1_is_red_for_every_other_shape_of_k_1(shape: tuple[int, ...]) -> None:
    assert_red(
        shape_1(proposal_alone(2, 1, 2, torch.zeros(*shape, dtype=torch.int64))), "SHAPE-1", "wrong shape", step=0
    )


@pytest.mark.parametrize(("rows", "fine"), [(1, False), (2, True), (3, False), (4, True), (8, False)])
def test_shape_1_lets_propose_return_the_padded_batch(rows: int, fine: bool) -> None:
    run = good_run()
    run = replace(run, setup=replace(run.setup, batch_buckets=(1, 4, 8)))
    wide = step(1, "propose", facts=TensorFacts.of(torch.zeros(rows, K, dtype=torch.int64)))(run)
    assert (shape_1(wide) == []) == fine
    exact = replace(wide, setup=replace(wide.setup, batch_buckets=(2, 4, 8)))
    assert (shape_1(exact) == []) == (rows == 2)


SHAPES: list[tuple[str, Corruption, str]] = [
    ("width passed through", proposal(torch.zeros(2, K + 1, dtype=torch.int64)), "wrong shape"),
    ("floats", proposal(torch.zeros(2, K)), "wrong dtype"),
    ("bools", proposal(torch.zeros(2, K, dtype=torch.bool)), "wrong dtype"),
    ("a list", step(1, "propose", token_ids=[[1, 2, 3], [1, 2, 3]]), "not integers of the right shape"),
    ("copy lost a row", step(1, "propose", token_ids=torch.zeros(1, K, dtype=torch.int64)), "right shape"),
    ("width 0", step(1, "propose", sampled_width=0), "width of the sampled tokens"),
    ("width k+2", step(1, "propose", sampled_width=K + 2), "width of the sampled tokens"),
    ("marks", step(1, "propose", discarded=(False,)), "discarded mark"),
    ("k", step(1, "propose", k=K + 1), "k lies outside"),
]


@pytest.mark.parametrize(("corrupt", "says"), [case[1:] for case in SHAPES], ids=[case[0] for case in SHAPES])
def test_shape_1_is_red(corrupt: Corruption, says: str) -> None:
    assert shape_1(good_run()) == []
    assert_red(shape_1(corrupt(good_run())), "SHAPE-1", says, step=1)


def slot(field: str, row: int, column: int, value: int) -> Any:
    """Overwrite one slot of a matrix of the verify or propose trace."""

    def change(trace: Any) -> torch.Tensor:
        matrix: torch.Tensor = getattr(trace, field).clone()
        matrix[row, column] = value
        return matrix

    return change


CONTENT: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("accept 0", step(2, "verify", accept_lens=(1, 0)), "accept length", {"step": 2, "row": 1, "got": 0}),
    ("accept k+2", step(2, "verify", accept_lens=(1, 5)), "accept length", {"step": 2, "row": 1, "expected": "1..4"}),
    (
        "accepted more than drafted",
        step(2, "verify", draft_token_ids=slot("draft_token_ids", 1, 2, -1)),
        "accept length",
        {"step": 2, "row": 1, "expected": "1..3", "got": 4},
    ),
    ("accept_lens", completion("b", accept_lens=(2, 9)), "completion.accept_lens", {"row": 1, "got": 9}),
    ("hole in block", step(2, "verify", emitted=slot("emitted", 1, 1, -1)), "not made of ids", {"step": 2, "row": 1}),
    ("stale slot", step(1, "verify", emitted=slot("emitted", 1, 3, 0)), "placeholder", {"step": 1, "row": 1}),
    ("id V emitted", step(2, "verify", emitted=slot("emitted", 1, 1, 16)), "not made of ids", {"step": 2, "row": 1}),
    (
        "id V drafted",
        step(1, "verify", draft_token_ids=slot("draft_token_ids", 1, 2, 16)),
        "verify: a draft slot",
        {"step": 1, "row": 1},
    ),
    (
        "id -2 proposed",
        step(1, "propose", token_ids=slot("token_ids", 1, 2, -2)),
        "propose: a draft slot",
        {"step": 1, "row": 1},
    ),
    (
        "draft after a hole",
        step(1, "propose", token_ids=slot("token_ids", 1, 0, -1)),
        "follows an unused slot",
        {"step": 1, "row": 1},
    ),
    ("completion", completion("b", token_ids=(11, 10, 5, 12, 15, 16)), "completion holds", {"row": 5, "position": 10}),
    ("delta", delta(2, "b", token_ids=(12, -1, 14)), "a step delivered an id", {"step": 2, "row": 1, "got": -1}),
]


@pytest.mark.parametrize(
    ("corrupt", "says", "where"), [case[1:] for case in CONTENT], ids=[case[0] for case in CONTENT]
)
def test_shape_2_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert shape_2(good_run(), VOCAB) == []
    assert_red(shape_2(corrupt(good_run()), VOCAB), "SHAPE-2", says, request_id="b", **where)


def test_shape_2_bounds_a_tree_by_its_depth_and_not_by_its_nodes() -> None:
    run = good_run()
    shallow = DrafterSetup(method="scripted", num_steps=2, topk=2, num_draft_tokens=4)
    run = completion("a", accept_lens=(3, 1, 3))(completion("b", accept_lens=(2, 3))(run))
    run = replace(run, setup=replace(run.setup, drafter=shallow))
    assert_red(shape_2(run, VOCAB), "SHAPE-2", "accept length", request_id="b", step=2, expected="1..3", got=4)


@pytest.mark.parametrize("bounds", [(-1, 3), (0, VOCAB)])
def test_shape_2_is_red_when_a_stranger_reaches_an_embedding(bounds: tuple[int, int]) -> None:
    run = step(2, embedded=bounds)(good_run())
    assert_red(shape_2(run, VOCAB), "SHAPE-2", "reached an embedding", step=2, got=bounds)


def test_shape_2_reads_the_vocabulary_of_the_target(tmp_path: Path) -> None:
    run = step(2, embedded=(0, VOCAB))(good_run())
    assert shape_2(run) == []
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    run = replace(run, setup=replace(run.setup, target=tmp_path))
    assert_red(shape_2(run), "SHAPE-2", "reached an embedding", step=2)


def test_shape_2_is_red_for_a_trace_that_cannot_be_read() -> None:
    run = step(2, "verify", accept_lens=(1,))(good_run())
    assert_red(shape_2(run, VOCAB), "SHAPE-2", "accept_lens must be 2 integers", step=2)
    floats = step(2, "verify", draft_token_ids=torch.zeros(2, 3))(good_run())
    assert_red(shape_2(floats, VOCAB), "SHAPE-2", "draft_token_ids must be [2", step=2)
    marks = step(2, "verify", discarded=(False,))(good_run())
    assert_red(shape_2(marks, VOCAB), "SHAPE-2", "discarded must have 2", step=2)
    wide = step(2, "verify", num_draft_tokens=7)(good_run())
    assert_red(shape_2(wide, VOCAB), "SHAPE-2", "num_draft_tokens - 1 wide", step=2, expected=6, got=3)


@pytest.mark.parametrize(
    ("step_", "k", "fine"), [(0, K, True), (1, 1, True), (1, 2, False), (2, 0, True), (2, 1, False)]
)
def test_shape_1_wants_no_more_drafts_than_were_set(step_: int, k: int, fine: bool) -> None:
    """The step after the change may still be given what the wider drafts before it came to."""
    run = replace(
        proposal_alone(2, k, K + 1, torch.zeros(2, k, dtype=torch.int64)),
        actions=(Action(step=2, name="set_num_steps", value=0), Action(step=1, name="set_num_steps", value=1)),
    )
    run = replace(run, steps=(replace(run.steps[0], step=step_),))
    assert (shape_1(run) == []) == fine


def test_shape_1_takes_the_last_length_that_was_set() -> None:
    twice = (Action(step=1, name="set_num_steps", value=0), Action(step=1, name="set_num_steps", value=2))
    run = replace(proposal_alone(2, 2, K + 1, torch.zeros(2, 2, dtype=torch.int64)), actions=twice)
    assert shape_1(replace(run, steps=(replace(run.steps[0], step=1),))) == []


def test_shape_1_counts_the_nodes_of_shallow_trees() -> None:
    run = proposal_alone(2, 2, 1, torch.zeros(2, 2, dtype=torch.int64))
    tree = DrafterSetup(method="EAGLE", num_steps=3, topk=2, num_draft_tokens=8)
    run = replace(run, setup=replace(run.setup, drafter=tree), actions=(Action(step=0, name="set_num_steps", value=1),))
    assert shape_1(run) == []
    deep = proposal_alone(2, 3, 1, torch.zeros(2, 3, dtype=torch.int64))
    assert_red(shape_1(replace(run, steps=deep.steps)), "SHAPE-1", "k lies outside", expected="0..2", got=3)
