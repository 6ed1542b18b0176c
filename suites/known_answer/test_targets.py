"""Closed forms of the targets against an independent float64 forward pass over the weights as stored."""

from __future__ import annotations

import pytest
import torch

from harness.known_answer import FAMILIES
from harness.known_answer.census import LAG, CensusTarget
from harness.known_answer.dense import greedy, target_states
from harness.known_answer.markov import MarkovTarget, soft_law, walk_law, walk_successors
from suites.known_answer.support import DTYPES
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=2, stage="cpu", needs="cpu")

FORWARD = [(name, dtype) for dtype in DTYPES for name in FAMILIES]


@pytest.mark.parametrize(("name", "dtype"), tiered(FORWARD, *FORWARD[: len(FAMILIES)], ("census", "bfloat16")))
def test_closed_form_is_the_forward_pass(families, name, dtype):
    target = families(name, dtype).target
    for length, owner in ((1, 0), (9, 1), (40, 2)):
        tokens = target.prompt(length, seed=length, owner=owner)
        tokens += target.greedy(tokens, 8)
        states = target_states(target.config, target.weights, tokens)
        assert (states.hidden - target.hidden_rows(tokens)).abs().max() < 1e-9
        entering = target.layer_states(tokens, range(len(states.entering)))
        assert (torch.stack(states.entering, dim=1) - entering).abs().max() < 1e-9
        for place in range(len(tokens)):
            assert (states.logprobs[place] - target.logprobs(tokens[: place + 1])).abs().max() < 1e-8


@pytest.mark.parametrize("name", FAMILIES)
def test_mtp_host_says_what_the_target_says(families, name):
    built = families(name, "float32")
    host = built.drafters["mtp"].target
    prompt = built.target.prompt(5, seed=1)
    assert host.greedy(prompt, 40) == built.target.greedy(prompt, 40)
    assert greedy(host.config, host.weights, prompt, 12) == built.target.greedy(prompt, 12)


@pytest.mark.parametrize("name", FAMILIES)
def test_first_and_last_id_are_ordinary_and_eos_is_not(families, name):
    target = families(name, "float32").target
    owners = range(4) if isinstance(target, CensusTarget) else (0,)
    seen = {token for owner in owners for token in target.greedy(target.prompt(4, owner, owner), 250)}
    assert {0, target.vocab_size - 1} <= seen
    assert (target.eos_token_id in seen) == (name == "walk-eos")


def test_walk_reaches_eos_where_it_was_asked_to():
    successors = walk_successors(64, 2, seed=5, eos_after=9)
    target = MarkovTarget(walk_law(successors, 5))
    assert target.next_token([9]) == 2
    assert len(set(target.greedy([9], 64))) == 64


def test_soft_law_gives_eos_its_probability():
    target = MarkovTarget(soft_law(16, 2, seed=0, eos_probability=0.25))
    assert target.logprobs([7])[2].exp() == pytest.approx(0.25, abs=1e-6)
    assert target.logprobs([7]).exp().sum() == pytest.approx(1.0, abs=1e-12)


def test_walk_gap_is_far_above_rounding(families):
    for dtype in DTYPES:
        target = families("walk", dtype).target
        assert min(target.margin([token]) for token in range(64)) > 9.9


def test_census_choice_depends_on_the_lagged_token_and_on_the_histogram():
    target = CensusTarget()
    alphabet = target.alphabets.members[1]
    calls = target.alphabets.calls
    prompt = list(target.prompt(30, seed=3, owner=1))
    place = len(prompt) - 1 - LAG
    for other in alphabet:
        changed = [*prompt[:place], other, *prompt[place + 1 :]]
        same_kind = (
            target.alphabets.kind[target.next_token(changed)] == target.alphabets.kind[target.next_token(prompt)]
        )
        assert same_kind == (calls[other] == calls[prompt[place]])
    choices = {target.next_token([*(3 * [used]), *prompt]) for used in alphabet}
    assert len(choices) == 2


def test_census_margin_holds_for_300_tokens(families):
    for dtype in DTYPES:
        target = families("census", dtype).target
        for owner in range(4):
            tokens = target.prompt(1 + 5 * owner, seed=owner, owner=owner)
            tokens += target.greedy(tokens, 300)
            margins = [target.margin(tokens[:end]) for end in range(len(tokens) - 300, 300)]
            assert min(margins) > 0.02
            assert set(tokens) == set(target.alphabets.members[owner])


def test_bfloat16_rounding_keeps_every_greedy_choice(families):
    """Rounding every step to bfloat16 moves the gap between the best two by less than half of what it is."""
    target = families("census", "bfloat16").target
    tokens = target.prompt(6, seed=2, owner=2)
    tokens += target.greedy(tokens, 294)
    rounded = target_states(target.config, target.weights, tokens, torch.bfloat16)
    exact = target_states(target.config, target.weights, tokens)
    assert tuple(rounded.logprobs.argmax(-1)[5:-1].tolist()) == tokens[6:]
    best = exact.logprobs.topk(2).indices
    gap, moved = (states.logprobs.double().gather(1, best).diff()[5:] for states in (exact, rounded))
    assert (gap - moved).abs().max() < 0.02 < gap.abs().min()


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="vocab_size=32"):
        MarkovTarget(torch.zeros(32, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="alphabet_size=10"):
        CensusTarget(alphabet_size=10)
    with pytest.raises(ValueError, match="owners=9"):
        CensusTarget(owners=9)
