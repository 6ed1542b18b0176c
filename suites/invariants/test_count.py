"""COUNT-1 and COUNT-2: a good run is green, and each kind of miscount is red with its request named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.contract import HiddenStates, Run, SpecCounters, Usage
from harness.invariants import count_1, count_2, count_2_blocks
from suites.registration import suite

from .builders import Corruption, assert_red, both, completion, delta, good_run, request, step, two_requests

suite(seconds=0.3, stage="cpu", needs="cpu")


def hidden(prefill: int | None = None, decode: int | None = None) -> Any:
    """Keep so many rows of a completion's hidden states."""
    return lambda done: HiddenStates(done.hidden_states.prefill[:prefill], (done.hidden_states.decode * 2)[:decode])


BROKEN_1: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("billed short", completion("b", usage=Usage(5, 5)), "usage.completion_tokens", {"expected": 6, "got": 5}),
    ("billed block", completion("b", usage=Usage(5, 7)), "usage.completion_tokens", {"expected": 6, "got": 7}),
    ("prompt billed", completion("b", usage=Usage(4, 6)), "usage.prompt_tokens", {"expected": 5, "got": 4}),
    ("cached", completion("b", usage=Usage(5, 6, 9)), "cached_tokens", {"got": 9}),
    ("echo", completion("b", prompt_token_ids=(4, 5, 6, 7, 9)), "another prompt", {}),
    ("logprob short", completion("b", logprobs=lambda d: d.logprobs[:-1]), "logprob rows", {"expected": 6, "got": 5}),
    ("logprob long", completion("b", logprobs=lambda d: d.logprobs * 2), "logprob rows", {"got": 12}),
    ("no logprobs", completion("b", logprobs=None), "logprob rows", {"got": "nothing"}),
    ("no prompt logprobs", completion("b", prompt_logprobs=None), "prompt_logprobs are missing", {}),
    ("prompt logprobs", completion("b", prompt_logprobs=lambda d: d.prompt_logprobs[:-1]), "prompt logprob rows", {}),
    ("hole", completion("b", prompt_logprobs=lambda d: (None, None, *d.prompt_logprobs[2:])), "missing", {"row": 1}),
    ("first", completion("b", prompt_logprobs=lambda d: d.prompt_logprobs[1:2] * 5), "nothing precedes", {"row": 0}),
    ("no hidden", completion("b", hidden_states=None), "hidden states are missing", {}),
    ("one row per step", completion("b", hidden_states=hidden(decode=2)), "decode rows", {"expected": 5, "got": 2}),
    ("not cut", completion("b", hidden_states=hidden(decode=8)), "decode rows", {"expected": 5, "got": 8}),
    ("prefill short", completion("b", hidden_states=hidden(prefill=2)), "prefill block", {"expected": 5, "got": 2}),
    ("lost token", delta(1, "b", token_ids=lambda d: d.token_ids[:-1]), "steps delivered are not", {"row": 2}),
    ("junk token", delta(2, "b", token_ids=lambda d: (*d.token_ids, 3)), "steps delivered are not", {"row": 6}),
    ("early end", delta(1, "b", finished=True), "must say that the request finished", {"got": [1, 2]}),
    ("no end", delta(2, "b", finished=False), "must say that the request finished", {"got": []}),
    ("step logprobs", delta(2, "b", logprobs=()), "logprob rows of one delivery", {"step": 2, "expected": 3}),
    ("step rows", delta(2, "b", decode_hidden=()), "hidden rows that steps delivered", {"got": (5, 2)}),
    ("step prefill", delta(0, "b", prefill_hidden=None), "hidden rows that steps delivered", {"got": (0, 5)}),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in BROKEN_1], ids=[c[0] for c in BROKEN_1])
def test_count_1_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert count_1(good_run()) == []
    assert_red(count_1(corrupt(good_run())), "COUNT-1", says, request_id="b", **where)


def test_count_1_without_a_prefix_cache() -> None:
    run = good_run()
    run = replace(run, setup=replace(run.setup, prefix_cache=False))
    assert count_1(run) == []
    assert_red(count_1(completion("b", usage=Usage(5, 6, 1))(run)), "COUNT-1", "without a prefix cache", got=1)


def test_count_1_wants_one_completion_per_sample() -> None:
    wanted = good_run([request("a", (1, 2), n=2)], {"a": [4, 4]})
    [violation] = count_1(wanted)
    assert (violation.request_id, violation.index) == ("a", 1)


def test_count_1_excuses_a_request_that_was_aborted_before_it_ran() -> None:
    gone = replace(request("c", (1, 2)), abort_step=0)
    run = good_run([*two_requests()])
    never = replace(
        run.completions[0],
        request_id="c",
        prompt_token_ids=(1, 2),
        token_ids=(),
        finish_reason="abort",
        usage=Usage(2, 0),
        logprobs=None,
        prompt_logprobs=None,
        hidden_states=None,
        accept_lens=(),
    )
    run = replace(run, requests=(*run.requests, gone), completions=(*run.completions, never))
    assert count_1(run) == []


def counters(**changes: Any) -> Corruption:
    return lambda run: replace(run, counters=replace(run.counters, **changes))  # type: ignore[type-var]


def wrong_counters(run: Run) -> Run:
    nonsense: Any = {"drafts": 5}
    return replace(run, counters=nonsense)


BROKEN_2: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("drafts", counters(num_drafts=6), "num_drafts", {"expected": 5, "got": 6}),
    ("drafted", counters(num_draft_tokens=20), "num_draft_tokens", {"expected": 15, "got": 20}),
    ("accepted", counters(num_accepted_tokens=14), "num_accepted_tokens", {"expected": 9, "got": 14}),
    ("positions", counters(accepted_per_position=(4, 3, 3)), "per_position", {"expected": (4, 3, 2)}),
    ("missing position", counters(accepted_per_position=(4, 3)), "per_position", {"got": (4, 3, 0)}),
    ("not counters", wrong_counters, "not SpecCounters", {}),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in BROKEN_2], ids=[c[0] for c in BROKEN_2])
@pytest.mark.parametrize("traced", [True, False])
def test_count_2_is_red(corrupt: Corruption, says: str, where: dict[str, Any], traced: bool) -> None:
    run = good_run() if traced else replace(good_run(), steps=())
    assert count_2(run) == []
    assert_red(count_2(corrupt(run)), "COUNT-2", says, **where)


def test_count_2_does_not_count_discarded_rows() -> None:
    run = step(2, "verify", discarded=(False, True))(good_run())
    assert_red(count_2(run), "COUNT-2", "num_drafts", expected=4, got=5)
    right = SpecCounters(num_drafts=4, num_draft_tokens=12, num_accepted_tokens=6, accepted_per_position=(3, 2, 1))
    spared = replace(run, counters=right)
    assert count_2(spared) == []


def test_count_2_survives_an_accept_length_of_uninitialised_memory() -> None:
    run = step(2, "verify", accept_lens=(1, 10**12))(good_run())
    assert_red(count_2(run), "COUNT-2", "num_accepted_tokens", expected=10**12 + 5, got=9)


def test_count_2_needs_something_to_recount() -> None:
    run = replace(good_run(), steps=())
    assert_red(count_2(completion("a", accept_lens=None)(run)), "COUNT-2", "cannot be recounted")


def lose_last_block(run: Run) -> Run:
    """Request a is told to end after its second block, although a third was accepted."""
    return both(
        delta(3, "a", token_ids=(), decode_hidden=(), logprobs=()),
        completion("a", token_ids=lambda d: d.token_ids[:5]),
    )(run)


BLOCKS: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("accept_lens", completion("a", accept_lens=(3, 1, 3)), "completion.accept_lens", {"got": (3, 1, 3)}),
    ("cut entry", completion("a", accept_lens=(3, 1)), "completion.accept_lens", {"expected": (3, 1, 4)}),
    ("draft_lens", completion("a", draft_lens=(3, 3, 2)), "completion.draft_lens", {"expected": (3, 3, 3)}),
    (
        "accepted was not drafted",
        step(1, "verify", draft_token_ids=lambda v: v.draft_token_ids.roll(1, 0)),
        "not the drafts of that step",
        {"step": 1, "row": 0},
    ),
    ("undelivered", lose_last_block, "never delivered", {"step": 3, "row": 0}),
    (
        "half a block",
        delta(1, "a", token_ids=lambda d: d.token_ids[:2]),
        "not delivered whole",
        {"step": 1, "row": 0},
    ),
    ("invented", delta(2, "a", token_ids=(9, 9)), "no accepted block", {"step": 2, "got": (9, 9)}),
    (
        "unreadable",
        step(2, "verify", emitted=torch.zeros(1, 4)),
        "unreadable verify trace",
        {"step": 2, "request_id": None},
    ),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in BLOCKS], ids=[c[0] for c in BLOCKS])
def test_count_2_blocks_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert count_2_blocks(good_run()) == []
    assert_red(count_2_blocks(corrupt(good_run())), "COUNT-2", says, **({"request_id": "a"} | where))


def test_count_2_blocks_without_a_trace_sees_blocks_that_never_arrived() -> None:
    run = replace(good_run(), steps=())
    assert count_2_blocks(run) == []
    cut = completion("a", token_ids=lambda d: d.token_ids[:6])(run)
    assert count_2_blocks(cut) == []
    lost = completion("a", token_ids=lambda d: d.token_ids[:5])(run)
    assert_red(count_2_blocks(lost), "COUNT-2", "never reached the user", request_id="a", got=5)


def test_count_2_blocks_of_an_engine_that_drafts_before_the_prompt_has_run() -> None:
    """No token came without a verify step."""
    run = replace(good_run(), steps=())
    run = replace(run, capabilities=replace(run.capabilities, drafts_with_prefill=True))
    assert count_2_blocks(completion("a", token_ids=lambda d: d.token_ids[:5])(run)) == []
    lost = completion("a", token_ids=lambda d: d.token_ids[:4])(run)
    assert_red(count_2_blocks(lost), "COUNT-2", "never reached the user", request_id="a", got=4)


def test_an_abort_may_drop_one_block_on_its_way_and_not_two() -> None:
    aborted = completion("a", finish_reason="abort")
    assert count_2_blocks(both(lose_last_block, aborted)(good_run())) == []
    gone = {"token_ids": (), "decode_hidden": (), "logprobs": ()}
    both_lost = both(lose_last_block, delta(2, "a", **gone), aborted)(good_run())
    assert_red(count_2_blocks(both_lost), "COUNT-2", "never delivered", request_id="a", step=2)


def test_count_2_blocks_follows_blocks_that_arrive_a_step_late() -> None:
    """Overlap scheduling: results of a verify step are handed over in the next step."""
    run = good_run()
    steps = list(run.steps)
    late = [replace(steps[i], deltas=steps[i - 1].deltas if i > 1 else ()) for i in range(1, len(steps))]
    assert count_2_blocks(replace(run, steps=(steps[0], *late))) == []
