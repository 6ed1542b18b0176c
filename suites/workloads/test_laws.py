"""Sampled workloads: the budget of false alarms holds, every law is the oracle's, and errors of 0.02 are found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest

from harness.contract import Capabilities, Refused, Request, SamplingParams
from harness.oracles.sampling import History, decision_gap, next_token_law
from harness.workloads.known import known_family
from harness.workloads.lanes import LANES
from harness.workloads.laws import (
    ALL_KINDS,
    COIN_IDS,
    DRAFT_METHODS,
    GROUPS,
    RUN_ALPHA,
    RequestedLaw,
    copies,
    independence_alpha,
    kinds,
    law_alpha,
    num_tests,
    processors,
    seeded_batch,
)
from suites.registration import suite

suite(seconds=0.5, stage="cpu", needs="cpu")

EVERYTHING = frozenset(field.name for field in fields(SamplingParams))
CLAIMS = Capabilities(engine="any", version="0", drafters=frozenset(), features=EVERYTHING)
COIN = known_family("coin").target
KNOWN = [kind for kind in ALL_KINDS if "allowed_token_ids" not in processors(COIN_IDS)[kind]]


def asked(kind: str, prompt: tuple[int, ...] = (15, 0)) -> Request:
    return Request(request_id=kind, prompt_token_ids=prompt, sampling=kinds(EVERYTHING, [kind])[kind])


def test_all_tests_of_a_run_together_keep_the_rate() -> None:
    arms = [arm for lane in LANES for method in DRAFT_METHODS for arm in ((lane, method), (lane, method, "control"))]
    spent = sum(num_tests(group) * law_alpha() for _ in arms for group in GROUPS)
    spent += len(LANES) * len(DRAFT_METHODS) * independence_alpha()
    assert 0.99 * RUN_ALPHA < spent <= RUN_ALPHA * (1 + 1e-12)


def test_every_field_that_changes_the_law_has_a_kind() -> None:
    used = {name for asked_for in processors(COIN_IDS).values() for name in asked_for}
    unused = EVERYTHING - used - {"max_new_tokens", "seed", "n", "stop", "ignore_eos", "logprobs", "prompt_logprobs"}
    assert unused == {"json_schema", "regex"}
    assert set(ALL_KINDS) == {kind for group in GROUPS.values() for kind in group}


def test_what_is_not_claimed_is_not_asked_for() -> None:
    assert set(kinds(frozenset({"temperature", "top_k"}))) == {"plain", "temperature", "top_k"}
    with pytest.raises(Refused, match="temperature: not claimed"):
        kinds(frozenset({"top_k"}))
    claimed = frozenset({"temperature"})
    assert {request.sampling.seed for request in seeded_batch(claimed, COIN_IDS).requests} == {None}
    assert {request.sampling.n for request in copies(claimed, COIN_IDS)} == {1}


def outputs(length: int) -> Iterator[tuple[int, ...]]:
    for size in range(length + 1):
        yield from itertools.product(COIN_IDS, repeat=size)


@pytest.mark.parametrize("kind", KNOWN)
def test_a_remembered_law_is_the_oracles(kind: str) -> None:
    """Behind every output of up to four tokens, and no filter there decides by less than float32 can tell."""
    law = RequestedLaw(COIN, CLAIMS)
    for prompt in ((15, 0), (12,), (0, 12)):
        request = asked(kind, prompt)
        stops = {*request.sampling.stop_token_ids, COIN.eos_token_id}
        for output in outputs(4):
            logits = COIN.logprobs((*prompt, *output)).numpy()
            history = History(prompt, output)
            right = next_token_law(logits, request.sampling, history, stop_ids=stops)
            assert law(request, output).tolist() == right.tolist()
            assert decision_gap(logits, request.sampling, history, stop_ids=stops) > 1e-4


def test_a_law_of_a_grammar_is_not_known() -> None:
    request = asked("plain")
    with pytest.raises(ValueError, match="grammar"):
        RequestedLaw(COIN, CLAIMS)(replace(request, sampling=replace(request.sampling, regex="a*")), ())
