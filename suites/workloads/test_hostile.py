"""Hostile drafters do what their names say, as pure functions of what is committed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.contract import PLACEHOLDER
from harness.workloads.hostile import accept_exactly, accept_pattern, hostile_drafters
from harness.workloads.known import vocabulary
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

WALK = vocabulary("walk")
HOSTILE = hostile_drafters(WALK.continue_, WALK.vocab_size, WALK.eos_token_id)
TOKENS = st.integers(1, 12).flatmap(lambda size: st.integers(0, 99).map(lambda seed: WALK.prompt(size, seed)))


def accepted(tokens: tuple[int, ...], drafts: list[int] | tuple[int, ...]) -> int:
    """Leading run of drafts that equals the target's choice."""
    right = WALK.continue_(tokens, len(drafts))
    return next((i for i, draft in enumerate(drafts) if draft != right[i]), len(drafts))


@given(tokens=TOKENS, k=st.integers(1, 6), data=st.data())
def test_exactly_so_many_drafts_are_right(tokens: tuple[int, ...], k: int, data: st.DataObject) -> None:
    wanted = data.draw(st.integers(0, k))
    drafts = accept_exactly(WALK.continue_, WALK.vocab_size, tokens, wanted, k)
    assert len(drafts) == k
    assert accepted(tokens, drafts) == wanted


@given(tokens=TOKENS, k=st.integers(1, 6))
def test_scripts_are_pure(tokens: tuple[int, ...], k: int) -> None:
    for name, script in HOSTILE.items():
        assert list(script("r0", tokens, k)) == list(script("r0", tokens, k)), name
        assert len(script("r0", tokens, k)) <= k, name
        assert hash(script) == hash(hostile_drafters(WALK.continue_, WALK.vocab_size, WALK.eos_token_id)[name]), name


@given(tokens=TOKENS, k=st.integers(2, 6))
def test_scripts_do_what_their_names_say(tokens: tuple[int, ...], k: int) -> None:
    drafts = {name: list(script("r0", tokens, k)) for name, script in HOSTILE.items()}
    assert accepted(tokens, drafts["always_right"]) == k
    assert accepted(tokens, drafts["always_wrong"]) == 0
    assert accepted(tokens, drafts["wrong_at_first"]) == 0
    assert drafts["wrong_at_first"][1:] == list(WALK.continue_(tokens, k))[1:]
    assert drafts["placeholder"] == [PLACEHOLDER] * k
    assert accepted(tokens, drafts["eos_after_right"]) == 1
    assert sum(not 0 <= draft < WALK.vocab_size for draft in drafts["out_of_range"]) == 1
    assert accepted(tokens, drafts["alternating"]) == (k if len(tokens) % 2 else 0)


def test_random_scripts_cover_their_range() -> None:
    lengths, silences = set(), set()
    for seed in range(200):
        tokens = WALK.prompt(1 + seed % 9, seed)
        lengths.add(len(HOSTILE["random_length"]("r0", tokens, 3)))
        silences.add(tuple(HOSTILE["silent"]("r0", tokens, 3))[:1] in ((), (PLACEHOLDER,)))
    assert lengths == {0, 1, 2, 3}
    assert silences == {True, False}


@given(pattern=st.lists(st.integers(1, 5), min_size=1, max_size=5), prompt_len=st.integers(1, 5))
def test_a_pattern_comes_out_as_it_went_in(pattern: list[int], prompt_len: int) -> None:
    k, prompt = 4, WALK.prompt(prompt_len, 3)
    script = accept_pattern(WALK.continue_, WALK.vocab_size, {"r": prompt_len}, {"r": pattern})
    tokens = (*prompt, *WALK.continue_(prompt, 1))
    lens = []
    for _ in range(2 * len(pattern)):
        lens.append(1 + accepted(tokens, list(script("r", tokens, k))))
        tokens += WALK.continue_(tokens, lens[-1])
    assert lens == pattern * 2


def test_a_resumed_request_gets_the_rest_of_its_block() -> None:
    prompt = WALK.prompt(3, 1)
    script = accept_pattern(WALK.continue_, WALK.vocab_size, {"r": 3}, {"r": [4, 2]})
    inside = (*prompt, *WALK.continue_(prompt, 3))
    assert 1 + accepted(inside, list(script("r", inside, 4))) == 2


def test_a_pattern_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"patterns\['r'\]"):
        accept_pattern(WALK.continue_, WALK.vocab_size, {"r": 3}, {"r": [2, 0]})
