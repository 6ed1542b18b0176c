"""The finish oracle: every order of stop id, stop string, minimum and cap, against a rule written from the end."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.contract import Request, SamplingParams
from harness.invariants import finish_1, finish_1_alone
from harness.oracles.finish import Finish, expected_completion, finish, greedy_stream
from suites.invariants.builders import ACCEPTS, good_run, request
from suites.registration import suite

suite(seconds=0.7, stage="cpu", needs="cpu")


def text_of(tokens: tuple[int, ...]) -> str:
    return "".join(chr(ord("a") + token_id) for token_id in tokens)


STREAM = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)


def test_a_stream_that_runs_dry_is_aborted_behind_its_last_token() -> None:
    for cap, reason in ((3, "length"), (4, "abort")):
        end = finish((0, 1, 2), SamplingParams(max_new_tokens=cap), detokenize=text_of, runs_dry=True)
        assert end == Finish((0, 1, 2), reason, "abc")
    with pytest.raises(ValueError, match="stream of 3"):
        finish((0, 1, 2), SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(max_new_tokens=4), Finish((0, 1, 2, 3), "length", "abcd")),
        (SamplingParams(max_new_tokens=4, stop_token_ids=(2, 3)), Finish((0, 1, 2), "stop", "ab")),
        (SamplingParams(max_new_tokens=3, stop_token_ids=(2,)), Finish((0, 1, 2), "stop", "ab")),
        (SamplingParams(max_new_tokens=2, stop_token_ids=(2,)), Finish((0, 1), "length", "ab")),
        (SamplingParams(max_new_tokens=9), Finish((0, 1, 2, 3, 4, 5, 6, 7), "stop", "abcdefg")),
        (SamplingParams(max_new_tokens=9, ignore_eos=True), Finish(STREAM[:9], "length", "abcdefghi")),
        (SamplingParams(max_new_tokens=9, ignore_eos=True, stop_token_ids=(7,)), Finish(STREAM[:8], "stop", "abcdefg")),
        (SamplingParams(stop=("cd",)), Finish((0, 1, 2, 3), "stop", "ab")),
        (SamplingParams(stop=("zz", "cd", "bcd")), Finish((0, 1, 2, 3), "stop", "a")),
        (SamplingParams(stop=("cd",), max_new_tokens=4), Finish((0, 1, 2, 3), "stop", "ab")),
        (SamplingParams(stop=("cd",), max_new_tokens=3), Finish((0, 1, 2), "length", "abc")),
        (SamplingParams(stop=("d",), stop_token_ids=(3,)), Finish((0, 1, 2, 3), "stop", "abc")),
        (SamplingParams(stop=("cd",), min_new_tokens=3), Finish((0, 1, 2, 3), "stop", "ab")),
        (SamplingParams(stop=("cd",), min_new_tokens=4), Finish((0, 1, 2, 3, 4, 5, 6, 7), "stop", "abcdefg")),
    ],
)
def test_by_hand(params: SamplingParams, expected: Finish) -> None:
    assert finish(STREAM, params, eos_token_ids=[7], detokenize=text_of) == expected


def test_the_context_is_a_cap_too() -> None:
    assert finish(STREAM, SamplingParams(max_new_tokens=8), room=5) == Finish(STREAM[:5], "length")


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="pass `detokenize`"):
        finish(STREAM, SamplingParams(stop=("x",)))
    with pytest.raises(ValueError, match="give a longer one"):
        finish(STREAM, SamplingParams(max_new_tokens=11))
    with pytest.raises(ValueError, match=r"stream\[1\]=1: a stop id before min_new_tokens=2; mask it"):
        finish(STREAM, SamplingParams(stop_token_ids=(1,), min_new_tokens=2))


def by_search(stream: tuple[int, ...], params: SamplingParams, eos: int) -> Finish:
    """The same rule, from the finished output backwards: the shortest prefix that ends for any reason."""
    for length in count(1):
        prefix = stream[:length]
        stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {eos})
        words = [word for word in params.stop if word in text_of(prefix)]
        if words:
            return Finish(prefix, "stop", text_of(prefix)[: min(text_of(prefix).index(word) for word in words)])
        if prefix[-1] in stops:
            return Finish(prefix, "stop", text_of(prefix[:-1]))
        if length == params.max_new_tokens:
            return Finish(prefix, "length", text_of(prefix))
    raise AssertionError


@settings(max_examples=80, deadline=None)
@given(
    stream=st.lists(st.integers(0, 4), min_size=12, max_size=12).map(tuple),
    cap=st.integers(1, 12),
    stops=st.lists(st.integers(0, 4), max_size=2).map(tuple),
    words=st.lists(st.text("abcde", min_size=1, max_size=3), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)
def test_agrees_with_a_search_over_prefixes(
    stream: tuple[int, ...], cap: int, stops: tuple[int, ...], words: tuple[str, ...], ignore_eos: bool
) -> None:
    params = SamplingParams(max_new_tokens=cap, stop_token_ids=stops, stop=words, ignore_eos=ignore_eos)
    expected = by_search(stream, params, 4)
    assert finish(stream, params, eos_token_ids=[4], detokenize=text_of) == expected
    longer = finish(stream, replace(params, max_new_tokens=12), eos_token_ids=[4], detokenize=text_of)
    assert longer.token_ids[:cap] == expected.token_ids


@settings(max_examples=30, deadline=None)
@given(
    cap=st.integers(1, 8),
    stops=st.lists(st.integers(0, 15), max_size=3).map(tuple),
    words=st.lists(st.text("abcdefghijklmnop", min_size=1, max_size=2), max_size=2).map(tuple),
)
def test_what_the_oracle_says_passes_the_finish_invariants(
    cap: int, stops: tuple[int, ...], words: tuple[str, ...]
) -> None:
    asked = request("a", (1, 2, 3), max_new_tokens=cap, stop_token_ids=stops, stop=words)
    whole = good_run([request("a", (1, 2, 3))], ACCEPTS)
    stream = whole.of("a").token_ids
    right = expected_completion(asked, stream, eos_token_ids=[9], detokenize=text_of)
    run = replace(whole, requests=(asked,), completions=(right,), steps=())
    assert finish_1_alone(run, [9], text_of) == []
    assert finish_1(run, run, [9], text_of) == []


def test_a_stream_from_a_rule_and_the_completion_made_of_it() -> None:
    stream = greedy_stream(lambda tokens: sum(tokens) % 5, (1, 2))
    assert list(islice(stream, 5)) == [3, 1, 2, 4, 3]
    wanted = Request(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_new_tokens=9))
    made = expected_completion(
        wanted, greedy_stream(lambda tokens: sum(tokens) % 5, (1, 2)), eos_token_ids=[4], context_length=5
    )
    assert (made.token_ids, made.finish_reason, made.usage.completion_tokens) == ((3, 1, 2), "length", 3)
