"""Sampled requests end to end: a seeded one gives the same tokens however it is run, and options keep their promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from harness.contract import EngineSetup, Request, Run
from harness.engines import engine_factory
from harness.oracles.sampling import History, next_token_law, support
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from reference_engine import EngineConfig, LLMEngine, SpecConfig
from reference_engine import SamplingParams as EngineParams
from reference_engine.sampling.random import CounterRandom, Stream
from suites.reference_engine.conftest import OpenLane
from suites.reference_engine.support import PROMPT, Method, ask, drawn, run
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=3.2, stage="cpu", needs="cpu")

SPECULATIVE = [name for name, lane in LANES.items() if lane.speculative]
PROBABILISTIC = ["STANDALONE", "EAGLE", "EAGLE3", "MTP", "MEDUSA", "FROZEN_KV_MTP", "DFLASH"]
CELLS = [(name, "greedy") for name in SPECULATIVE if name != "CUSTOM"] + [
    (name, "probabilistic") for name in PROBABILISTIC
]
IN_EVERY_RUN = [("EAGLE-tree", "greedy"), ("NGRAM", "greedy"), ("EAGLE3", "probabilistic"), ("DFLASH", "probabilistic")]
"""LAW-3 runs greedy drafts with all of them."""

OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4, "presence_penalty": 0.8},
    {"temperature": 1.5, "top_p": 0.8, "logit_bias": ((3, 2.0),), "logprobs": 2},
    {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.3, "min_new_tokens": 6, "stop_token_ids": (5, 6)},
    {"temperature": 0.0, "frequency_penalty": 0.5},
)

TROUBLE: dict[str, Any] = {"chunk_size": 3, "num_pages": 12, "page_size": 4, "max_running": 4, "batch_buckets": (3, 4)}
"""Prefills in chunks, a pool that holds two requests at most, padded batches."""


def requests(count: int = 5) -> list[Request]:
    return [
        ask(f"r{i}", [3 + (i + j) % 12 for j in range(2 + 3 * i)], seed=40 + i, max_new_tokens=9, **options)
        for i, options in enumerate(OPTIONS[:count])
    ]


def tokens(observed: Run) -> dict[tuple[str, int], tuple[int, ...]]:
    return {(done.request_id, done.index): done.token_ids for done in observed.completions}


def solos(setup: EngineSetup, batch: list[Request]) -> dict[tuple[str, int], tuple[int, ...]]:
    return {key: ids for request in batch for key, ids in tokens(run(setup, [request])).items()}


@pytest.mark.parametrize(("name", "method"), tiered(CELLS, *IN_EVERY_RUN))
def test_a_seed_gives_the_same_tokens_however_it_is_run(open_lane: OpenLane, name: str, method: Method) -> None:
    """Alone, in a batch, again on a warm engine, and in the worst of schedules with preemptions (and overlap). Each
    token has a chance under the options of its request, given what came before it."""
    lane = open_lane(name)
    setup = drawn(lane.setup(family="law"), method)
    batch = requests()
    engine = engine_factory("reference").start(setup)
    together, again = engine.run(batch), engine.run(batch[::-1])
    for request, output, token in emitted(together):
        assert token in support(oracle_law(lane, request, output))
    assert tokens(again) == tokens(together)
    assert solos(setup, batch[1:3]).items() <= tokens(together).items()
    troubled = run(replace(setup, overlap=method == "greedy", **TROUBLE), batch)
    assert tokens(troubled) == tokens(together)
    assert sum(len(step.preempted) for step in troubled.steps) > 0


def emitted(observed: Run) -> Iterator[tuple[Request, tuple[int, ...], int]]:
    """Every token with its request and the output before it."""
    for done in observed.completions:
        for place, token in enumerate(done.token_ids):
            yield observed.request(done.request_id), done.token_ids[:place], token


def oracle_law(lane: Lane, request: Request, output: tuple[int, ...]) -> Any:
    """The closed form of the target's law under the plain float64 processors."""
    target = lane.target("law")
    logits = target.logprobs((*request.prompt_token_ids, *output)).numpy()
    stops = {*request.sampling.stop_token_ids, target.eos_token_id}
    return next_token_law(logits, request.sampling, History(request.prompt_token_ids, output), stop_ids=stops)


@pytest.mark.parametrize(("name", "method"), [("EAGLE", "probabilistic"), ("EAGLE-tree", "greedy"), ("MTP", "greedy")])
def test_several_samples_are_as_many_seeded_requests(open_lane: OpenLane, name: str, method: Method) -> None:
    """Sample i of seed s is the request with seed s + i; no two of five are the same."""
    setup = drawn(open_lane(name).setup(family="law", max_running=3), method)
    one = ask(temperature=1.0, seed=7, n=5, max_new_tokens=12)
    together = tokens(run(setup, [one]))
    assert set(together) == {("a", index) for index in range(5)}
    assert len(set(together.values())) == 5
    for index in (0, 3):
        single = ask(temperature=1.0, seed=7 + index, max_new_tokens=12)
        assert run(setup, [single]).of("a").token_ids == together["a", index]


class Recorder:
    """Counter-based numbers, and a record of what was asked: (stream, first position, seed) of the first row."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def uniform(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        self.asked.append((int(stream), int(positions.flatten()[0]), int(seeds.flatten()[0])))
        return CounterRandom().uniform(seeds, positions, stream)


@pytest.mark.parametrize(
    ("name", "method"), [("STANDALONE", "probabilistic"), ("EAGLE", "greedy"), ("EAGLE-tree", "greedy")]
)
def test_numbers_are_asked_for_the_positions_that_they_decide(open_lane: OpenLane, name: str, method: Method) -> None:
    """Verification decides positions from the committed length on, drafting those behind the tokens just emitted: no
    number ever decides two tokens."""
    drafter = drawn(open_lane(name).setup(family="law"), method).drafter
    assert drafter is not None
    spec = SpecConfig(**{field.name: getattr(drafter, field.name) for field in fields(SpecConfig)})
    random = Recorder()
    engine = LLMEngine(EngineConfig(model=open_lane(name).setup(family="law").target, spec=spec), random)
    engine.add_request("a", PROMPT, EngineParams(temperature=1.0, seed=9, max_new_tokens=20))
    length = len(PROMPT)
    while engine.has_unfinished:
        random.asked.clear()
        delivered = engine.step().outputs
        verdicts = {position for stream, position, _ in random.asked if stream != Stream.DRAFT}
        drafts = [position for stream, position, _ in random.asked if stream == Stream.DRAFT]
        assert verdicts == {length}
        assert {seed for *_, seed in random.asked} == {9}
        assert len(set(random.asked)) == len(random.asked), "one number for two decisions"
        length += sum(len(output.token_ids) for output in delivered)
        if method == "probabilistic" and not any(output.finish_reason for output in delivered):
            assert drafts == [length, length + 1, length + 2]


def test_unseeded_requests_differ(open_lane: OpenLane) -> None:
    observed = run(open_lane("EAGLE").setup(family="law"), [ask(f"r{i}", temperature=1.0, n=2) for i in range(3)])
    assert len(set(tokens(observed).values())) == 6


def greedy_by_oracle(lane: Lane, request: Request) -> tuple[int, ...]:
    """Token by token, to a stop or the cap."""
    output: tuple[int, ...] = ()
    stops = {*request.sampling.stop_token_ids, lane.target("law").eos_token_id}
    while len(output) < request.sampling.max_new_tokens and not stops.intersection(output):
        output = (*output, int(oracle_law(lane, request, output).argmax()))
    return output


LOOKING_BACK: tuple[dict[str, Any], ...] = (
    {"presence_penalty": -2.5},
    {"presence_penalty": -8.0},
    {"frequency_penalty": 8.0, "logit_bias": ((7, 20.0),)},
    {"frequency_penalty": 1.5, "logit_bias": ((4, 9.0), (9, 8.0))},
    {"repetition_penalty": 0.4},
    {"repetition_penalty": 1.6, "presence_penalty": 1.0, "logit_bias": ((0, 7.0),)},
    {"presence_penalty": -2.0, "min_new_tokens": 11, "stop_token_ids": (13, 7, 14)},
    {"min_new_tokens": 5, "stop_token_ids": (0, 1, 4, 6, 7, 10, 11, 12, 13, 14, 15)},
    {"bad_words": (*((a, b) for a in range(0, 16, 2) for b in range(1, 16, 3)), (4, 5, 6, 7))},
    {"bad_words": ((3,), (5, 8), (8, 9, 10)), "presence_penalty": -3.0},
    {"allowed_token_ids": (0, 4, 5, 8, 9, 15), "frequency_penalty": 1.0},
)


@pytest.mark.parametrize("name", tiered(SPECULATIVE, "EAGLE", "EAGLE-tree", "MEDUSA", "CUSTOM"))
def test_penalties_and_minima_see_the_drafts_of_their_window(open_lane: OpenLane, name: str) -> None:
    """Greedy, all in one batch: as without a drafter, as the oracle says, and not as without the option."""
    lane = open_lane(name)
    batch = [ask(f"r{i}", max_new_tokens=20, **fields) for i, fields in enumerate(LOOKING_BACK)]
    drafted, plain = run(lane.setup(family="law", k=4), batch), run(lane.setup(family="law", speculative=False), batch)
    for request in batch:
        done = drafted.of(request.request_id)
        assert done.token_ids == greedy_by_oracle(lane, request)
        assert done.token_ids == plain.of(request.request_id).token_ids
        assert done.token_ids != lane.target("law").greedy(request.prompt_token_ids, 20)[: len(done.token_ids)]


@pytest.mark.parametrize("name", SPECULATIVE)
def test_a_stop_right_behind_the_minimum(open_lane: OpenLane, name: str) -> None:
    """At every place of a block: one token earlier it would have been held back, here it must not be."""
    lane = open_lane(name)
    stream = lane.target("law").greedy(PROMPT, 12)
    batch = [ask(f"r{least}", min_new_tokens=least, stop_token_ids=(stream[least],)) for least in range(8)]
    for least, done in enumerate(run(lane.setup(family="law", k=4), batch).completions):
        assert (done.token_ids, done.finish_reason) == (stream[: least + 1], "stop")
