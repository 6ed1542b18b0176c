"""Closed-form drafts against the dense forward passes, and what acceptance they lead to."""

from __future__ import annotations

import pytest
import torch

from harness.known_answer.base import accept_lens
from harness.known_answer.census import LAG
from harness.known_answer.dense import greedy
from suites.known_answer.support import DTYPES, dense, dense_accept_lens
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=3.1, stage="cpu", needs="cpu")

READING = ("eagle", "eagle3", "mtp", "medusa", "frozen_kv_mtp", "dflash")
RECURSIVE = ("eagle", "eagle3", "mtp", "mtp3", "frozen_kv_mtp")
"""They are fed their own output rows."""
FORWARD = [(name, dtype) for dtype in DTYPES for name in ("walk", "law", "census")]
FORWARD += [("walk-perfect", "bfloat16"), ("census-perfect", "bfloat16")]
ROW_DRAFTERS = [("mtp3", "walk"), *((name, family) for name in READING for family in ("walk", "law", "census"))]


def histories(target):
    """Committed tokens of several requests: prompts of the shortest and of other lengths, then greedy tokens."""
    for length, generated, owner in ((1, 1, 0), (9, 6, 2)):
        prompt = target.prompt(length, seed=length, owner=owner)
        yield prompt + target.greedy(prompt, generated)


@pytest.mark.parametrize(("name", "dtype"), tiered(FORWARD, *FORWARD[:3], ("census-perfect", "bfloat16")))
def test_drafts_are_those_of_the_forward_pass(families, name, dtype):
    """In float64, and with every step rounded to the dtype of the checkpoint."""
    for drafter in families(name, dtype).drafters.values():
        for tokens in histories(drafter.target):
            expected = drafter.draft(tokens, 3)
            if drafter.method == "STANDALONE":
                assert greedy(drafter.config, drafter.weights, tokens, 3) == expected
                continue
            for precision in (torch.float64, DTYPES[dtype]):
                assert dense(drafter, precision).draft(tokens, 3) == expected


@pytest.mark.parametrize("name", ["walk", "law", "census"])
def test_a_long_recursion_stays_exact(families, name):
    """Rounding must not grow from draft to draft: rows that are off by 1e-6 change nothing."""
    for label, drafter in families(name, "float32").drafters.items():
        for seed in range(2 if label in RECURSIVE else 0):
            prompt = drafter.target.prompt(3, seed, seed)
            tokens = (*prompt, *drafter.target.greedy(prompt, 3))
            forward = dense(drafter, torch.float32)
            rows = forward.features(tokens[:-1]) * (1 + 1e-6)
            assert forward.draft(tokens, 16, rows) == drafter.draft(tokens, 16), label


@pytest.mark.parametrize("name", ["walk-eos", "law-perfect", "census"])
def test_drafts_after_tokens_that_the_target_would_not_choose(families, name):
    """A sampled bonus token need not be the greedy one, nor fit the token before it."""
    for drafter in families(name, "float32").drafters.values():
        if drafter.method != "STANDALONE":
            tokens = tuple((11 * place + 5) % drafter.target.vocab_size for place in range(12))
            for end in range(2, 12, 3):
                assert dense(drafter).draft(tokens[:end], 4) == drafter.draft(tokens[:end], 4)


@pytest.mark.parametrize(("drafter", "family"), ROW_DRAFTERS)
def test_accept_lens_are_those_of_the_forward_pass(families, drafter, family):
    built = families(family, "float32").drafters[drafter]
    prompt = built.target.prompt(5, seed=3, owner=1)
    assert dense_accept_lens(built, prompt, 20, 3) == built.accept_lens(prompt, 20, 3)


@pytest.mark.parametrize("name", ["walk", "census"])
def test_accept_lens_cover_everything_and_are_ragged(families, name):
    built = families(name, "float32")
    for drafter in built.drafters.values():
        for k in (1, 3, 5):
            runs = [drafter.accept_lens(built.target.prompt(3, seed, seed), 60, k) for seed in range(8)]
            seen = {length for lens in runs for length in lens}
            assert seen == set(range(1, k + 2)) or (drafter.guesses and seen >= {1, 2, min(k, 3) + 1})
            assert len(set(runs)) > 4
            assert all(sum(lens) >= 59 for lens in runs)


@pytest.mark.parametrize("name", ["walk-perfect", "law-perfect", "census-perfect"])
def test_perfect_drafters_are_always_right(families, name):
    built = families(name, "bfloat16")
    for drafter in built.drafters.values():
        for k in (1, 4, LAG):
            lens = drafter.accept_lens(built.target.prompt(2, 5, 1), 50, k)
            assert set(lens) == {k + 1} or (drafter.guesses and sum(lens) > 1.2 * len(lens))


def test_only_census_tokens_are_guessed(families):
    for name in ("walk", "law", "census"):
        guessing = {folder for folder, drafter in families(name, "float32").drafters.items() if drafter.guesses}
        assert guessing == ({"medusa", "frozen_kv_mtp", "dflash"} if name == "census" else set())


def test_accept_lens_by_hand(families):
    """Accept lengths equal a count over the greedy tokens for a drafter whose drafts are written out here."""
    target = families("walk", "float32").target
    prompt = target.prompt(3, seed=1)
    truth = (*prompt, *target.greedy(prompt, 40))

    def right_for(steps):
        sizes = iter(steps)

        def draft(tokens, k):
            right = next(sizes)
            following = truth[len(tokens) : len(tokens) + k]
            return (*following[:right], *(token + 1 for token in following[right:]))

        return draft

    assert accept_lens(target, right_for([2, 0, 3, 1]), prompt, 9, 3) == (3, 1, 4)
    assert accept_lens(target, right_for([2, 0, 3, 1]), prompt, 10, 3) == (3, 1, 4, 2)
    assert accept_lens(target, right_for([2, 0, 3, 1]), prompt, 10, 3, {truth[len(prompt) + 5]}) == (3, 1, 4)
    assert accept_lens(target, right_for([]), prompt, 1, 3) == ()


def test_steps_end_at_eos(families):
    built = families("walk-eos", "float32")
    for drafter in built.drafters.values():
        lens = drafter.accept_lens(built.target.prompt(3, 4), 200, 3, {built.target.eos_token_id})
        tokens = built.target.greedy(built.target.prompt(3, 4), sum(lens) + 1)
        assert tokens.index(built.target.eos_token_id) >= sum(lens[:-1]) + 1


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_one_token_is_too_short_a_history(families, name):
    for family in ("walk", "census"):
        with pytest.raises(ValueError, match="at least 2 committed tokens"):
            families(family, "float32").drafters[name].draft((5,), 2)
