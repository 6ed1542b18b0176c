"""The hybrid target: its rows spell what its recurrent state took in, and every wrong state changes row and token."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from harness.known_answer.census import LAG
from harness.known_answer.dense import target_states
from harness.known_answer.hybrid import DIGITS, FAST, SEEN_UNIT, SLOW
from suites.known_answer.support import dense
from suites.registration import suite

suite(seconds=0.7, stage="cpu", needs="cpu")


@pytest.fixture(scope="module")
def target(families):
    return families("hybrid", "float32").target


def said(target, length, owner, seed=1):
    tokens = target.prompt(5, seed=seed, owner=owner)
    return tokens + target.greedy(tokens, length - 5)


def test_a_row_spells_the_last_tokens_and_all_counts(target):
    tokens = said(target, 200, owner=3)
    rows = target_states(target.config, target.weights, tokens, torch.float32).hidden
    counts: Counter[int] = Counter()
    for place, token in enumerate(tokens):
        counts[token] += 1
        reading = target.decode_row(rows[place], place)
        assert (reading.token, reading.owner) == (token, 3)
        assert reading.state_counts == reading.counts == counts
        assert reading.recent == tokens[place::-1][:DIGITS]
        assert reading.error < 1e-3


def test_choices_lead_by_half_a_count(target):
    for owner in (0, 3):
        tokens = said(target, 300, owner, seed=owner)
        margins = [target.margin(tokens[:end]) for end in range(5, 300, 4)]
        assert min(margins) > 0.24
        assert set(tokens) == set(target.alphabets.members[owner])


def test_it_says_what_a_census_would_say(families, target):
    """Up to where a census can tell a lead of one: this is why a plain draft model can be perfect."""
    prompt = target.prompt(7, seed=2, owner=1)
    assert families("hybrid-perfect", "float32").drafters["standalone"].model.greedy(prompt, 290) == target.greedy(
        prompt, 290
    )


WRONG_STATES = {
    "lost": lambda _tokens, _other: (),
    "a neighbour's": lambda _tokens, other: other,
    "advanced twice": lambda tokens, _other: (*tokens[:-1], tokens[-2]),
    "one token behind": lambda tokens, _other: tokens[:-2],
    "ahead by a rejected draft": lambda tokens, _other: (*tokens[:-1], tokens[-7]),
}
"""What the state had taken in when the last of the tokens came."""


@pytest.mark.parametrize("fault", WRONG_STATES)
def test_a_wrong_state_changes_rows_and_tokens(target, fault):
    """The row reads otherwise at once, though attention saw the right tokens; some choices after it are others."""
    layout, wrong_choices = target.places, 0
    for length in range(20, 36, 2):
        tokens = said(target, length, owner=0)
        taken = (*WRONG_STATES[fault](tokens, said(target, length - 3, owner=1)), tokens[-1])
        row, state = target.hidden_rows(tokens)[-1], target.state(taken)[0].sum(1)
        row = row * (63.0 / row[layout.constants[0]])
        row[layout.recent : layout.seen] = state[FAST]
        row[layout.seen : layout.seen + target.vocab_size] = state[SLOW] / SEEN_UNIT
        reading = target.decode_row(row, length - 1)
        assert reading.counts == Counter(tokens)
        assert reading.state_counts == Counter(taken) != reading.counts
        assert reading.recent == taken[::-1][:DIGITS]
        following = []
        for _ in range(10):
            known = (*tokens, *following)
            following.append(target.alphabets.choose(known[-1], known[-1 - LAG], (*taken, *following)))
        wrong_choices += tuple(following) != target.greedy(tokens, 10)
    assert wrong_choices >= 3


def test_state_is_that_of_the_forward_pass(target):
    """The closed form against sums over pairs: what the dense forward writes into a row is its readout."""
    tokens = said(target, 60, owner=2)
    rows, layout = target_states(target.config, target.weights, tokens).hidden, target.places
    for place in (0, 1, 17, 59):
        exact = rows[place] * (63.0 / rows[place][layout.constants[0]])
        state = target.state(tokens[: place + 1])[0].sum(1)
        assert (exact[layout.recent : layout.seen] - state[FAST]).abs().max() < 1e-9
        assert (exact[layout.seen : layout.seen + 33] * SEEN_UNIT - state[SLOW]).abs().max() < 1e-8


def test_no_recurrent_tensor_is_idle(target):
    tokens = said(target, 30, owner=1)
    known = target_states(target.config, target.weights, tokens)
    for name in (name for name in target.weights if ".recurrent." in name):
        generator = torch.Generator().manual_seed(0)
        fresh = 0.02 * torch.randn(target.weights[name].shape, generator=generator)
        states = target_states(target.config, target.weights | {name: fresh}, tokens)
        assert (states.hidden - known.hidden).abs().max() > 1e-3, name
        # So wide open is the slow gate that noise does not move it; the fast one shows in the rows alone.
        moved = not torch.equal(states.logprobs.argmax(-1), known.logprobs.argmax(-1))
        assert moved or name.endswith("g_proj.weight"), name


@pytest.mark.parametrize("name", ["hybrid", "hybrid-perfect"])
def test_mtp_drafts_are_those_of_its_forward_pass(families, name):
    built = families(name, "float32").drafters["mtp"]
    witness = dense(built)
    for length in (2, 3, 9, 20, 45):
        tokens = built.target.prompt(length, seed=length, owner=1)
        tokens += built.target.greedy(tokens, 1)
        assert witness.draft(tokens, 7) == built.draft(tokens, 7)


def test_mtp_reads_the_state_in_the_row_that_it_is_fed(families):
    """A row whose counts are those of another state gives other drafts, with the right token, histogram and lag."""
    built = families("hybrid-perfect", "float32").drafters["mtp"]
    witness, layout, wrong = dense(built), built.target.places, 0
    for length in range(12, 24):
        tokens = said(built.target, length, owner=1)
        features = witness.features(tokens[:-1])
        features[-1, layout.seen : layout.seen + 33] = features[-4, layout.seen : layout.seen + 33]
        wrong += witness.draft(tokens, 4, features) != built.draft(tokens, 4)
    assert wrong >= 4
