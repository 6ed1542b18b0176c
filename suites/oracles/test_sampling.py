"""The sampling law: hand-made cases, and agreement with a second implementation on random scores."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from harness.contract import Capabilities, SamplingParams
from harness.oracles.sampling import ORDER, History, block_law, decision_gap, next_token_law, support
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")

EMPTY = History(prompt=(0,))
LAW = np.array([0.4, 0.3, 0.2, 0.1])
LOGITS = np.log(LAW)


def sampled(**params: object) -> SamplingParams:
    return replace(SamplingParams(temperature=1.0), **params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (sampled(), [0.4, 0.3, 0.2, 0.1]),
        (SamplingParams(), [1, 0, 0, 0]),
        (sampled(temperature=0.5), LAW**2 / (LAW**2).sum()),
        (sampled(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (sampled(top_k=9), [0.4, 0.3, 0.2, 0.1]),
        (sampled(top_p=0.69), [4 / 7, 3 / 7, 0, 0]),
        (sampled(top_p=0.71), [4 / 9, 3 / 9, 2 / 9, 0]),
        (sampled(top_p=1e-9), [1, 0, 0, 0]),
        (sampled(min_p=0.49), [4 / 9, 3 / 9, 2 / 9, 0]),
        (sampled(min_p=0.51), [4 / 7, 3 / 7, 0, 0]),
        (sampled(logit_bias=((3, np.log(4)), (3, 0.0))), LAW * [1, 1, 1, 4] / 1.3),
        (sampled(logit_bias=((0, -np.inf),)), [0, 3 / 6, 2 / 6, 1 / 6]),
    ],
)
def test_each_option_alone(params: SamplingParams, expected: list[float]) -> None:
    np.testing.assert_allclose(next_token_law(LOGITS, params, EMPTY), expected, atol=1e-12)


def test_top_k_keeps_ties_and_greedy_takes_the_lowest_id() -> None:
    flat = np.zeros(4)
    np.testing.assert_allclose(next_token_law(flat, sampled(top_k=1), EMPTY), [0.25] * 4)
    np.testing.assert_allclose(next_token_law(flat, SamplingParams(top_k=3), EMPTY), [1, 0, 0, 0])


def test_penalties_by_hand() -> None:
    """Scores 1, 1, -1, -1; the prompt holds 0 and 2, the output 1 twice and 3 once."""
    history = History(prompt=(0, 2, 2), output=(1, 3, 1))
    scores = np.array([1.0, 1.0, -1.0, -1.0])

    def after(**params: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        law = np.log(next_token_law(scores, sampled(**params), history))
        return law - law[0]  # type: ignore[no-any-return]

    np.testing.assert_allclose(after(presence_penalty=0.5), [0, -0.5, -2, -2.5])
    np.testing.assert_allclose(after(frequency_penalty=0.5), [0, -1.0, -2, -2.5])
    np.testing.assert_allclose(after(repetition_penalty=2.0), [0, 0, -2.5, -2.5])
    both = after(repetition_penalty=2.0, frequency_penalty=0.5)
    np.testing.assert_allclose(both, [0, -1.0, -2.5, -3.0])


def test_the_order_of_filters_matters_and_is_the_callers() -> None:
    """top-p of the law that top-k left is wider than top-p of the whole law."""
    params = sampled(top_k=2, top_p=0.55)
    assert support(next_token_law(LOGITS, params, EMPTY)) == {0}
    late = ("penalties", "logit_bias", "temperature", "top_p", "top_k", "min_p")
    assert support(next_token_law(LOGITS, params, EMPTY, order=late)) == {0, 1}
    hot = sampled(temperature=4.0, min_p=0.6)
    assert support(next_token_law(LOGITS, hot, EMPTY)) == {0, 1, 2, 3}
    early = ("penalties", "logit_bias", "min_p", "temperature", "top_k", "top_p")
    assert support(next_token_law(LOGITS, hot, EMPTY, order=early)) == {0, 1}
    with pytest.raises(ValueError, match="unknown steps"):
        next_token_law(LOGITS, params, EMPTY, order=("typical_p",))


def test_the_default_order_is_that_of_the_contract() -> None:
    made = Capabilities(engine="e", version="0", drafters=frozenset(), features=frozenset())
    assert made.processor_order == ORDER


def test_min_new_tokens_masks_stop_ids_until_exactly_enough() -> None:
    params = sampled(min_new_tokens=2, max_new_tokens=9)
    for output, allowed in (((), {1, 2, 3}), ((1,), {1, 2, 3}), ((1, 1), {0, 1, 2, 3})):
        assert support(next_token_law(LOGITS, params, History((0,), output), stop_ids=[0])) == allowed
    greedy = SamplingParams(min_new_tokens=2)
    assert support(next_token_law(LOGITS, greedy, EMPTY, stop_ids=[0])) == {1}


def test_banned_ids_and_bad_words_are_never_sampled() -> None:
    assert support(next_token_law(LOGITS, sampled(), EMPTY, banned_ids=[0, 3])) == {1, 2}
    words = sampled(bad_words=((2,), (1, 1, 0)))
    for output, allowed in (((), {0, 1, 3}), ((1,), {0, 1, 3}), ((1, 1), {1, 3}), ((1, 1, 2), {0, 1, 3})):
        assert support(next_token_law(LOGITS, words, History((1, 1), output))) == allowed


@pytest.mark.parametrize(
    ("logits", "says"),
    [([0.0, np.nan], "without NaN"), ([[0.0]], "must be"), ([], "must be"), ([-np.inf], "nothing is left")],
)
def test_scores_without_a_law_are_refused(logits: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        next_token_law(logits, sampled(), EMPTY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "gap"),
    [
        (sampled(), np.inf),
        (SamplingParams(), 0.1),
        (sampled(top_k=2), 0.1),
        (sampled(top_p=0.69), 0.01),
        (sampled(top_p=0.35), 0.05),
        (sampled(min_p=0.51), 0.004),
    ],
)
def test_decision_gap_tells_how_close_a_filter_came(params: SamplingParams, gap: float) -> None:
    assert decision_gap(LOGITS, params, EMPTY) == pytest.approx(gap)


def _second_opinion(logits: list[float], params: SamplingParams, prompt: tuple[int, ...]) -> torch.Tensor:
    ids, scores = torch.tensor([prompt]), torch.tensor([logits], dtype=torch.float64)
    steps = [RepetitionPenaltyLogitsProcessor(params.repetition_penalty), TemperatureLogitsWarper(params.temperature)]
    steps += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    steps += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    steps += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    for step in steps:
        scores = step(ids, scores)
    return scores.softmax(-1)[0]


@settings(max_examples=80, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8), min_size=2, max_size=12),
    temperature=st.sampled_from([0.3, 0.9, 1.7]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.2, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.9]),
    data=st.data(),
)
def test_agrees_with_transformers(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    data: st.DataObject,
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    tokens = st.integers(0, len(logits) - 1)
    prompt = tuple(data.draw(st.lists(tokens, min_size=1, max_size=5)))
    if decision_gap(logits, params, History(prompt)) < 1e-9:
        return
    expected = _second_opinion(logits, params, prompt).numpy()
    np.testing.assert_allclose(next_token_law(logits, params, History(prompt)), expected, atol=1e-12)


def test_block_law_is_a_law_and_the_product_of_its_steps() -> None:
    def logits_of(tokens: tuple[int, ...]) -> list[float]:
        return [0.3 * tokens[-1], -0.2 * len(tokens), 0.1]

    params = sampled(top_k=2, presence_penalty=0.7)
    law = block_law(logits_of, params, (1,), 3)
    assert sum(law.values()) == pytest.approx(1.0)
    for block, mass in law.items():
        steps = (
            next_token_law(logits_of((1, *block[:i])), params, History((1,), block[:i]))[block[i]] for i in range(3)
        )
        assert mass == pytest.approx(float(np.prod(list(steps))))
    ended = block_law(logits_of, params, (1,), 3, stop_ids=[0])
    assert sum(ended.values()) == pytest.approx(1.0)
    assert all(0 not in block[:-1] and (len(block) == 3 or block[-1] == 0) for block in ended)


def test_the_law_does_not_depend_on_how_ids_are_numbered() -> None:
    params = sampled(temperature=0.8, top_p=0.75, min_p=0.1)
    for order in permutations(range(4)):
        law = next_token_law(LOGITS[list(order)], params, EMPTY)
        np.testing.assert_allclose(law, next_token_law(LOGITS, params, EMPTY)[list(order)])
