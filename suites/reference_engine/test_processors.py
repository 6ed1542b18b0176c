"""Processors against the plain float64 oracle, and the way that rows of one batch keep to themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness import contract
from harness.oracles import sampling as oracle
from reference_engine.request import RequestState, SamplingParams
from reference_engine.sampling.processors import History, SamplingBatch, adjust_logits, draw, heated, probabilities
from suites.registration import suite

suite(seconds=1.3, stage="cpu", needs="cpu")

VOCAB = 7
EOS = (6,)
CPU = torch.device("cpu")
TOKEN = st.integers(0, VOCAB - 1)
NEAR = 1e-4
"""Probability: where a filter decides by less than this, float32 may decide otherwise than float64."""


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Every option, each off half of the time."""
    on: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.sampled_from((0.25, 0.7, 1.0, 3.0)),
        "top_k": st.integers(1, VOCAB + 2),
        "top_p": st.sampled_from((0.05, 0.3, 0.62, 0.9, 0.999)),
        "min_p": st.sampled_from((0.02, 0.11, 0.5)),
        "repetition_penalty": st.sampled_from((0.6, 1.3, 2.0)),
        "presence_penalty": st.sampled_from((-1.0, 0.4, 2.0)),
        "frequency_penalty": st.sampled_from((-0.7, 0.3, 1.5)),
        "logit_bias": st.lists(st.tuples(TOKEN, st.sampled_from((-9.0, -float("inf"), 0.7, 4.0))), max_size=2).map(
            tuple
        ),
        "min_new_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(TOKEN, max_size=1).map(tuple),
        "bad_words": st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "allowed_token_ids": st.lists(TOKEN, min_size=3, max_size=6, unique=True).map(tuple),
    }
    fields = {name: draw(values) for name, values in on.items() if draw(st.booleans())}
    return {"max_new_tokens": 9, **fields}


Row = tuple[dict[str, Any], list[float], tuple[int, ...], tuple[int, ...]]
LOGITS = st.lists(st.integers(-40, 40).map(lambda eighth: eighth / 8), min_size=VOCAB, max_size=VOCAB)
ROWS = st.lists(
    st.tuples(options(), LOGITS, st.lists(TOKEN, max_size=4).map(tuple), st.lists(TOKEN, max_size=6).map(tuple)),
    min_size=1,
    max_size=4,
)


def state(fields: dict[str, Any]) -> RequestState:
    return RequestState("a", 0, (0,), SamplingParams(**fields), return_hidden_states=False, seed=0, arrival=0)


def counts(tokens: tuple[int, ...]) -> list[int]:
    return [tokens.count(token) for token in range(VOCAB)]


def laws(rows: list[Row], padding: int) -> torch.Tensor:
    """[N, V] of the engine, all rows in one batch, padded as for a bucket."""
    size = len(rows) + padding
    batch = SamplingBatch.of([state(fields) for fields, *_ in rows], size, VOCAB, EOS, CPU)
    logits = torch.zeros(size, 1, VOCAB)
    prompts, outputs, lengths = torch.zeros(size, 1, VOCAB), torch.zeros(size, 1, VOCAB), torch.zeros(size, 1)
    for place, (_, scores, prompt, output) in enumerate(rows):
        logits[place, 0] = torch.tensor(scores)
        prompts[place, 0], outputs[place, 0] = torch.tensor(counts(prompt)), torch.tensor(counts(output))
        lengths[place] = len(output)
    before = logits.clone()
    tails = None
    if batch.bad_words is not None:
        ends = [((-1,) * batch.bad_words.length + output)[len(output) :] for *_, output in rows]
        tails = torch.tensor(ends + [(-1,) * batch.bad_words.length] * padding, dtype=torch.long)[:, None]
    law = probabilities(adjust_logits(logits, batch, History(prompts, outputs, lengths, tails)), batch)
    assert torch.equal(logits, before), "the raw logits were overwritten"
    assert torch.isfinite(law[: len(rows)]).all()
    return law[: len(rows), 0]


def expected(row: Row) -> np.ndarray[Any, np.dtype[np.float64]]:
    fields, scores, prompt, output = row
    params = contract.SamplingParams(**fields)
    stop_ids = {*params.stop_token_ids, *EOS}
    return oracle.next_token_law(scores, params, oracle.History(prompt, output), stop_ids=stop_ids)


def clear_cut(row: Row) -> bool:
    """Whether something is left to sample and no filter decides by a hair (equal scores of a greedy row are clear)."""
    fields, scores, prompt, output = row
    params = contract.SamplingParams(**fields)
    stop_ids = {*params.stop_token_ids, *EOS}
    try:
        gap = oracle.decision_gap(scores, params, oracle.History(prompt, output), stop_ids=stop_ids)
    except ValueError:
        return False
    return gap > NEAR or (params.greedy and gap == 0.0)


@settings(max_examples=100)
@given(rows=ROWS, padding=st.integers(0, 2))
def test_every_law_is_the_oracles(rows: list[Row], padding: int) -> None:
    """In a batch of requests with all kinds of options, which must not leak from row to row."""
    assume(all(clear_cut(row) for row in rows))
    right = np.stack([expected(row) for row in rows])
    np.testing.assert_allclose(laws(rows, padding).numpy(), right, atol=2e-6)


def test_no_option_is_left_out() -> None:
    """Every field of a request that shapes the law changes this one."""
    changes: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 2,
        "top_p": 0.6,
        "min_p": 0.3,
        "repetition_penalty": 1.7,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "logit_bias": ((1, 2.0),),
        "min_new_tokens": 5,
        "bad_words": ((6,), (0, 2, 0)),
        "allowed_token_ids": (0, 2, 3),
    }
    scores, prompt, output = [1.0, 0.5, 0.25, 0.0, -0.5, -1.0, 0.75], (0, 1), (2, 0, 2)
    plain = {"temperature": 1.0, "max_new_tokens": 9}
    base = laws([(plain, scores, prompt, output)], 0)
    for name, value in changes.items():
        row: Row = ({**plain, name: value}, scores, prompt, output)
        law = laws([row], 0)
        assert (law - base).abs().max() > 0.01, name
        np.testing.assert_allclose(law[0].numpy(), expected(row), atol=2e-6)


def test_temperatures_of_any_size() -> None:
    logits = torch.tensor([[80.0, 79.0, -80.0]])
    for temperature in (1e-45, 1e-38, 1e-3, 1.0, 1e38):
        law = heated(logits, torch.tensor([[temperature]])).softmax(-1)
        right = torch.softmax((logits.double() - 80) / torch.tensor(temperature).double(), -1)
        assert float((law - right).abs().max()) < 1e-6


@settings(max_examples=100)
@given(
    weights=st.lists(st.sampled_from((0.0, 0.0, 1e-30, 0.1, 0.25, 1.0, 3.0)), min_size=1, max_size=VOCAB),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.just(float(np.nextafter(1, 0)))),
)
def test_sampling_inverts_the_distribution_function(weights: list[float], uniform: float) -> None:
    """The id whose share of [0, 1) holds the number; never one without a share."""
    assume(sum(weights) > 0)
    probs = torch.tensor(weights, dtype=torch.float64)
    drawn = int(draw(probs[None], torch.tensor([uniform], dtype=torch.float64), "torch"))
    assert weights[drawn] > 0
    assert sum(weights[:drawn]) <= uniform * sum(weights) * (1 + 1e-12)
    assert uniform * sum(weights) <= sum(weights[: drawn + 1]) * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_keep_the_lowest_id(dtype: torch.dtype) -> None:
    """top-k keeps ties with the k-th best, top-p takes equal scores in order of id, greedy takes the first."""
    logits = torch.zeros(3, 1, 4, dtype=dtype)
    rows = [{"temperature": 1.0, "top_k": 2}, {"temperature": 1.0, "top_p": 0.5}, {}]
    batch = SamplingBatch.of([state(fields) for fields in rows], 3, 4, (), CPU)
    law = probabilities(logits, batch)[:, 0].tolist()
    assert law == [[0.25] * 4, [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("fields", "above", "below"),
    [
        ({"min_p": 0.1}, [1.0, 0.1001], [1.0, 0.0999]),
        ({"top_p": 0.6}, [0.5999, 0.4001], [0.6001, 0.3999]),
        ({"top_p": 0.9}, [0.5, 0.3999, 0.1001], [0.5, 0.4001, 0.0999]),
    ],
)
def test_filters_decide_at_their_line(fields: dict[str, float], above: list[float], below: list[float]) -> None:
    """The last token is kept on one side of the threshold and dropped on the other, 0.1% or less away."""
    for weights, kept in ((above, True), (below, False)):
        batch = SamplingBatch.of([state({"temperature": 1.0, **fields})], 1, len(weights), (), CPU)
        law = probabilities(torch.tensor(weights).log()[None, None], batch)[0, 0]
        assert bool(law[-1] > 0) == kept
