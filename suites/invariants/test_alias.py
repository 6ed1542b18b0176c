"""ALIAS-1: rows of another request or position are named. ALIAS-2: shared, viewed and expanded memory is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.contract import DrafterSetup, HiddenStates, LogprobRow, Run, StepTrace, TensorFacts
from harness.invariants import Misuse, Scribbler, Violation, alias_1, alias_1_layers, alias_2, alias_2_scribbled
from harness.invariants.memory import own_storage_flaw
from harness.invariants.scribble import canary
from suites.registration import suite

from .builders import WIDTH, Corruption, assert_red, both, completion, delta, good_run, name_row, request, rows, step

suite(seconds=0.4, stage="cpu", needs="cpu")


def decode_rows(change: Callable[[list[torch.Tensor]], Any]) -> Callable[[Any], HiddenStates]:
    """Edit the list of decode rows of a completion."""
    return lambda d: HiddenStates(d.hidden_states.prefill, tuple(change(list(d.hidden_states.decode))))


def prefill_rows(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], HiddenStates]:
    return lambda d: HiddenStates(change(d.hidden_states.prefill.clone()), d.hidden_states.decode)


def other(run: Run) -> list[torch.Tensor]:
    hidden = run.of("a").hidden_states
    assert hidden is not None
    return [*hidden.prefill, *hidden.decode]


FOREIGN = other(good_run())


def put(place: int, row: torch.Tensor) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    return lambda found: [*found[:place], row, *found[place + 1 :]]


def swap(found: list[torch.Tensor]) -> list[torch.Tensor]:
    return [found[1], found[0], *found[2:]]


# The decode rows of b are rows 5..9 of its sequence.
ROWS: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    (
        "row of the neighbour",
        completion("b", hidden_states=decode_rows(put(2, FOREIGN[7]))),
        "not that of its request",
        {"row": 7, "position": 7, "origin": "this is row 7 of request 'a'"},
    ),
    (
        "swapped",
        completion("b", hidden_states=decode_rows(swap)),
        "not that of its request",
        {"row": 5, "origin": "this is row 6 of the same request"},
    ),
    (
        "repeated row",
        completion("b", hidden_states=decode_rows(lambda r: [r[0], r[0], *r[2:]])),
        "not that of its request",
        {"row": 6, "origin": "this is row 5 of the same request"},
    ),
    (
        "prefill shifted",
        completion("b", hidden_states=prefill_rows(lambda p: p.roll(1, 0))),
        "not that of its request",
        {"row": 0, "origin": "this is row 4 of the same request"},
    ),
    (
        "NaN",
        completion("b", hidden_states=decode_rows(put(0, torch.full((WIDTH,), torch.nan)))),
        "not that of its request",
        {"row": 5, "origin": "NaN: unwritten or freed memory"},
    ),
    (
        "invented",
        completion("b", hidden_states=decode_rows(put(0, torch.full((WIDTH,), 5.0)))),
        "not that of its request",
        {"row": 5, "origin": "no request's row"},
    ),
    ("too few", completion("b", hidden_states=decode_rows(lambda r: r[:2])), "differ in number", {"got": 7}),
    ("none", completion("b", hidden_states=None), "missing", {}),
    (
        "width",
        completion("b", hidden_states=HiddenStates(torch.zeros(5, 3), (torch.zeros(3),) * 5)),
        "expected width",
        {"got": [(3,)]},
    ),
    (
        "step delivers a foreign row",
        delta(1, "b", decode_hidden=lambda d: (FOREIGN[4], *d.decode_hidden[1:])),
        "delivered by a step",
        {"row": 5, "origin": "this is row 4 of request 'a'"},
    ),
    (
        "logprob row shifted",
        completion("b", logprobs=lambda d: d.logprobs[1:] + d.logprobs[:1]),
        "logprob row is about another token",
        {"row": 0, "position": 5},
    ),
    (
        "prompt logprob of another token",
        completion("b", prompt_logprobs=lambda d: (*d.prompt_logprobs[:3], LogprobRow(0, -1.0, 1), None)),
        "logprob row is about another token",
        {"row": 3, "position": 3},
    ),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in ROWS], ids=[case[0] for case in ROWS])
def test_alias_1_is_red_and_names_the_owner(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert alias_1(good_run(), rows) == []
    assert_red(alias_1(corrupt(good_run()), rows), "ALIAS-1", says, request_id="b", **where)


def test_alias_1_decodes_rows_for_the_message() -> None:
    corrupt = completion("b", hidden_states=decode_rows(put(2, FOREIGN[7])))
    [violation] = alias_1(corrupt(good_run()), rows, name_row)
    assert violation.expected == name_row(rows((4, 5, 6, 7, 8, 11, 10, 5))[7])
    assert violation.got == name_row(FOREIGN[7])
    assert violation.origin == f"this is row 7 of request 'a'; it says: {name_row(FOREIGN[7])}"


def test_alias_1_looks_for_the_origin_in_the_same_request_first() -> None:
    twins = good_run([request("a", (4, 5, 6)), request("b", (4, 5, 6))], {"a": [4, 4], "b": [4, 4]})
    [violation] = alias_1(completion("b", hidden_states=decode_rows(lambda r: [r[1], *r[1:]]))(twins), rows)
    assert violation.origin == "this is row 4 of the same request or row 4 of request 'a'"


def test_alias_1_lets_the_decoder_decide_where_values_are_coarse() -> None:
    """In bfloat16 one count of 16 lies inside the tolerance of values, and the decoder still tells it apart."""
    run = completion("b", hidden_states=decode_rows(lambda r: [*r[:4], r[4] + 1e-3]))(good_run())
    off_by_one = completion("b", hidden_states=prefill_rows(lambda p: p + torch.eye(WIDTH)[-1] / 2 * 1.2))(good_run())
    assert alias_1(run, rows, name_row, tolerance=0.2) == []
    assert alias_1(off_by_one, rows, tolerance=0.7) == []
    assert_red(alias_1(off_by_one, rows, name_row, tolerance=0.7), "ALIAS-1", "not that of", request_id="b", row=0)


def test_alias_1_refuses_a_truth_of_the_wrong_length() -> None:
    with pytest.raises(Misuse, match=r"must be \[10, width\]"):
        alias_1(good_run(), lambda tokens: rows(tokens)[:3])


def shared_between_requests(run: Run) -> Run:
    block = torch.zeros(2, WIDTH)
    return both(
        delta(1, "a", decode_hidden=lambda d: (block[0], *d.decode_hidden[1:])),
        delta(1, "b", decode_hidden=lambda d: (block[1], *d.decode_hidden[1:])),
    )(run)


def same_object_for_both(run: Run) -> Run:
    row = torch.zeros(WIDTH)
    return both(
        delta(1, "a", decode_hidden=lambda d: (row, *d.decode_hidden[1:])),
        delta(1, "b", decode_hidden=lambda d: (row, *d.decode_hidden[1:])),
    )(run)


def sampled_returned(run: Run) -> Run:
    """k = 1 and `[N, 1]` sampled tokens handed on as drafts: nothing but the storage tells."""
    sampled = torch.zeros(2, 3, dtype=torch.int64)
    return step(1, "propose", facts=TensorFacts.of(sampled), sampled=TensorFacts.of(sampled))(run)


STRIDED = torch.zeros(8, WIDTH)
NAMELESS = torch.zeros(8, WIDTH)

MEMORY: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("views of one block", shared_between_requests, "different requests' results", {"request_id": "b", "step": 1}),
    (
        "one object",
        same_object_for_both,
        "different requests' results",
        {"request_id": "b", "step": 1, "origin": "entry 1 of request 'a' sample 0"},
    ),
    (
        "view of verify output",
        both(
            step(1, "verify", hidden=TensorFacts.of(STRIDED)),
            delta(1, "b", decode_hidden=lambda d: (STRIDED[4], *d.decode_hidden[1:])),
        ),
        "view of a larger storage",
        {"request_id": "b", "step": 1, "row": 1, "origin": "the strided verify output of step 1"},
    ),
    (
        "rows of one request",
        completion("b", hidden_states=decode_rows(lambda r: [r[0], r[0], *r[2:]])),
        "rows of one request",
        {"request_id": "b", "row": 2},
    ),
    (
        "expanded row",
        completion("b", hidden_states=prefill_rows(lambda p: p[:1].clone().expand(5, WIDTH))),
        "stride 0",
        {"request_id": "b", "row": 0},
    ),
    (
        "sampled[:, :1]",
        step(1, "propose", facts=TensorFacts.of(torch.zeros(2, 2, dtype=torch.int64)[:, :1])),
        "propose is a view of a larger storage",
        {"step": 1},
    ),
    (
        "zero expanded",
        step(1, "propose", facts=TensorFacts.of(torch.zeros(1, dtype=torch.int64).expand(2, 3))),
        "propose has stride 0",
        {"step": 1},
    ),
    ("sampled returned", sampled_returned, "shares storage with the sampled tokens", {"step": 1}),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in MEMORY], ids=[case[0] for case in MEMORY])
def test_alias_2_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert alias_2(good_run()) == []
    assert_red(alias_2(corrupt(good_run())), "ALIAS-2", says, **where)


def test_alias_2_names_the_verify_output_only_where_it_is_the_origin() -> None:
    view = delta(1, "b", decode_hidden=lambda d: (STRIDED[4], *d.decode_hidden[1:]))
    elsewhere = [step(2, "verify", hidden=TensorFacts.of(STRIDED)), step(1, "verify", hidden=TensorFacts.of(NAMELESS))]
    for corrupt in elsewhere:
        found = alias_2(both(corrupt, view)(good_run()))
        assert_red(found, "ALIAS-2", "view of a larger storage", request_id="b", step=1, origin=None)


def test_a_stride_of_0_in_a_dimension_of_one_is_no_aliasing() -> None:
    single = torch.zeros(3).as_strided((1, 3), (0, 1))
    assert own_storage_flaw(TensorFacts.of(single)) is None
    assert own_storage_flaw(TensorFacts.of(torch.zeros(3).as_strided((2, 3), (0, 1)))) is not None


def test_alias_2_lets_a_step_and_the_completion_hand_over_the_same_object() -> None:
    run = good_run()
    given = [d.decode_hidden for s in run.steps for d in s.deltas if d.request_id == "a"]
    same = completion("a", hidden_states=decode_rows(lambda _: [row for part in given for row in part]))(run)
    assert alias_2(same) == []


def scribble(run: Run, meddle: Callable[[int, StepTrace], None] = lambda _number, _step: None) -> list[Violation]:
    """Play a run step by step into a Scribbler, as an engine would, and judge it against an untouched one."""
    scribbler = Scribbler()
    for number, trace in enumerate(run.steps):
        meddle(number, trace)
        scribbler(trace)
    return alias_2_scribbled(good_run(), run, scribbler)


def completions_from_deltas(run: Run) -> Run:
    """The engine hands the very objects of its steps over again in the completion."""
    for request_id in ("a", "b"):
        deltas = [d for s in run.steps for d in s.deltas if d.request_id == request_id]
        hidden = HiddenStates(deltas[0].prefill_hidden, tuple(row for d in deltas for row in d.decode_hidden))  # type: ignore[arg-type]
        run = completion(request_id, hidden_states=hidden)(run)
    return run


def test_scribbling_is_green_whether_completions_keep_their_own_rows_or_those_of_the_steps() -> None:
    assert scribble(good_run()) == []
    assert scribble(completions_from_deltas(good_run())) == []


def test_scribbling_overwrites_and_keeps_clones() -> None:
    run, scribbler = good_run(), Scribbler()
    for trace in run.steps:
        scribbler(trace)
    row = run.steps[1].deltas[0].decode_hidden[0]
    assert len(set(row.tolist())) == 1
    hidden = scribbler.hidden_states(("a", 0))
    assert hidden is not None
    assert torch.equal(hidden.prefill, rows((1, 2, 3)))
    assert scribbler.hidden_states(("z", 0)) is None


def test_canaries_are_exact_in_every_dtype_and_differ() -> None:
    values = torch.tensor([canary(number) for number in range(10_240)], dtype=torch.float64)
    assert torch.equal(values.bfloat16().double(), values)
    assert len(set(values.tolist())) == 10_240
    assert float(values.max()) < -3e4


def test_scribbling_finds_results_that_share_memory_within_a_step() -> None:
    found = scribble(shared_object(good_run()))
    assert_red(found, "ALIAS-2", "overwriting one result changed another", request_id="a", step=1)
    origins = [violation.origin or "" for violation in found]
    assert any("decode row of request 'b' sample 0 delivered at step 1" in origin for origin in origins)


def shared_object(run: Run) -> Run:
    shared = run.steps[1].deltas[0].decode_hidden[0]
    return delta(1, "b", decode_hidden=lambda d: (shared, *d.decode_hidden[1:]))(run)


def test_scribbling_finds_a_later_step_that_reuses_a_delivered_buffer() -> None:
    run = good_run()

    def reuse(number: int, trace: StepTrace) -> None:
        if number == 3:
            run.steps[1].deltas[1].decode_hidden[0].copy_(trace.deltas[0].decode_hidden[0])

    found = scribble(run, reuse)
    assert_red(found, "ALIAS-2", "a later step changed a result", request_id="b", step=3)
    assert len(found) == 1


def test_scribbling_finds_a_result_that_cannot_be_written() -> None:
    run = delta(1, "b", decode_hidden=lambda d: (torch.zeros(1).expand(WIDTH), *d.decode_hidden[1:]))(good_run())
    assert_red(scribble(run), "ALIAS-2", "cannot be written", request_id="b", step=1, got=(0,))


def test_scribbling_finds_state_that_was_read_after_it_had_been_given_away() -> None:
    """The drafter is fed a delivered row: only acceptance shows that it was overwritten."""
    run = completion("b", accept_lens=(2, 1))(good_run())
    assert_red(scribble(run), "ALIAS-2", "accept_lens differ", request_id="b", row=1)


def test_scribbling_finds_tokens_that_changed() -> None:
    run = completion("b", token_ids=(11, 10, 5, 12, 15, 0))(good_run())
    assert_red(scribble(run), "ALIAS-2", "tokens differ", request_id="b", row=5)


def test_scribbling_finds_a_completion_overwritten_through_another_request() -> None:
    run = good_run()
    mine = run.steps[1].deltas[0].decode_hidden[0]
    run = completion("b", hidden_states=decode_rows(put(0, mine)))(run)
    assert_red(scribble(run), "ALIAS-2", "neither right nor overwritten by its own user", request_id="b", row=5)


def test_scribbling_finds_rows_delivered_wrong_because_of_it() -> None:
    """A later row is computed from memory that the user owned by then."""
    run = delta(2, "b", decode_hidden=lambda d: (torch.full((WIDTH,), 3.0), *d.decode_hidden[1:]))(good_run())
    assert_red(scribble(run), "ALIAS-2", "hidden row differs", request_id="b", row=7)


def test_scribbling_leaves_nonsense_to_the_count() -> None:
    nonsense: Any = "row"
    run = delta(1, "b", decode_hidden=(nonsense,))(good_run())
    scribbler = Scribbler()
    scribbler(run.steps[1])
    assert scribbler.finish() == []


def test_scribbling_writes_to_inference_tensors() -> None:
    with torch.inference_mode():
        row = torch.zeros(WIDTH)
    run = good_run()
    scribbler = Scribbler()
    trace = delta(1, "b", decode_hidden=(row,))(run).steps[1]
    scribbler(replace(trace, deltas=trace.deltas[1:]))
    assert scribbler.finish() == []
    assert row[0] != 0


LAYERS = (4, 0)
KEEPING = DrafterSetup.chain("EXTRACT_HIDDEN_STATES", 1, aux_layer_ids=LAYERS)


def states(tokens: tuple[int, ...]) -> torch.Tensor:
    """[n, 2, WIDTH]: the second layer says everything with the other sign."""
    return torch.stack([rows(tokens), -rows(tokens)], dim=1)


def keeping_run() -> Run:
    run = good_run()
    kept = tuple(
        replace(done, layer_states=states((*done.prompt_token_ids, *done.token_ids)[:-1])) for done in run.completions
    )
    return replace(run, setup=replace(run.setup, drafter=KEEPING), completions=kept)


def kept_by(request_id: str) -> torch.Tensor:
    found = keeping_run().of(request_id).layer_states
    assert found is not None
    return found


def edited(place: int, layer: int, row: torch.Tensor) -> torch.Tensor:
    found = kept_by("b").clone()
    found[place, layer] = row
    return found


KEPT: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("missing", completion("b", layer_states=None), "are missing", {"got": "nothing"}),
    ("one layer", completion("b", layer_states=kept_by("b")[:, :1]), "not of the layers", {"expected": [4, 0]}),
    ("layers swapped", completion("b", layer_states=kept_by("b").flip(1)), "entering layer 4 is not that", {"row": 0}),
    ("row too few", completion("b", layer_states=kept_by("b")[:-1]), "differ in number", {}),
    (
        "neighbour's",
        completion("b", layer_states=edited(6, 1, kept_by("a")[7, 1])),
        "entering layer 0 is not that",
        {"row": 6, "origin": "this is row 7 of request 'a'"},
    ),
    (
        "shifted",
        completion("b", layer_states=kept_by("b").roll(1, 0)),
        "entering layer 4 is not that",
        {"row": 0, "origin": "this is row 9 of the same request"},
    ),
    ("no tensor", completion("b", layer_states=[[0.0]]), "layer_states is not of the right type", {}),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in KEPT], ids=[case[0] for case in KEPT])
def test_alias_1_is_red_for_kept_layers(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert alias_1_layers(keeping_run(), states) == []
    assert_red(alias_1_layers(corrupt(keeping_run()), states), "ALIAS-1", says, request_id="b", **where)


def test_an_aborted_request_may_have_kept_nothing() -> None:
    aborted = completion("b", layer_states=None, finish_reason="abort")(keeping_run())
    assert alias_1_layers(aborted, states) == []


def test_alias_2_looks_at_kept_layers() -> None:
    run = keeping_run()
    assert alias_2(run) == []
    shared = completion("b", layer_states=run.of("a").layer_states)(run)
    assert_red(alias_2(shared), "ALIAS-2", "shared between different requests", request_id="b")
