"""The far ends of what a request or a set-up may ask for: they work exactly, or are refused with the reason."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from harness.contract import Refused, Request, SamplingParams
from harness.invariants import judge
from harness.workloads.hostile import Constant
from harness.workloads.lanes import LANES
from reference_engine import EngineConfig, LLMEngine
from reference_engine import SamplingParams as EngineParams
from suites.reference_engine.conftest import OpenLane
from suites.reference_engine.support import PROMPT, Method, ask, drawn, run
from suites.registration import suite

suite(seconds=2.4, stage="cpu", needs="cpu")

SPECULATIVE = [name for name, lane in LANES.items() if lane.speculative]


@pytest.mark.parametrize("name", SPECULATIVE)
def test_requests_that_fill_the_context(open_lane: OpenLane, name: str) -> None:
    """Block tables have no column to spare: under overlap scheduling a perfect drafter runs far past the cap."""
    lane = open_lane(name)
    prompts = [lane.target("walk-perfect").greedy((start,), 5) for start in (10, 30)]
    requests = [ask(f"r{i}", prompt, max_new_tokens=35, ignore_eos=True) for i, prompt in enumerate(prompts)]
    setup: dict[str, Any] = {"family": "walk-perfect", "k": 7, "overlap": True, "page_size": 1, "context_length": 40}
    completions = lane.run(requests, **setup).completions
    for prompt, done in zip(prompts, completions, strict=True):
        assert done.token_ids == lane.target("walk-perfect").greedy(prompt, 35)


@pytest.mark.parametrize("fields", [{"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {"min_new_tokens": 3}])
def test_what_looks_back_works_without_a_drafter(open_lane: OpenLane, fields: dict[str, Any]) -> None:
    """A verify window without drafts has one row of logits, and it follows the committed tokens."""
    lane = open_lane("STANDALONE")
    request = ask(max_new_tokens=12, **fields)
    plain, drafted = lane.baseline([request], family="law"), lane.run([request], family="law")
    assert plain.idle
    assert len(plain.of("a").token_ids) == 12
    assert plain.of("a").token_ids == drafted.of("a").token_ids


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**63, 2**64 + 5, 10**30])
def test_any_integer_is_a_seed(open_lane: OpenLane, seed: int) -> None:
    lane = open_lane("EAGLE")
    request = ask(temperature=1.0, seed=seed, n=2, max_new_tokens=8)
    first, again = (lane.run([request], family="law", warm=warm) for warm in (False, True))
    assert [done.token_ids for done in first.completions] == [done.token_ids for done in again.completions]
    assert first.of("a", 0).token_ids != first.of("a", 1).token_ids


def test_unseeded_requests_of_an_engine_with_a_large_seed(open_lane: OpenLane) -> None:
    both = open_lane("none").run([ask("a", temperature=1.0), ask("b", temperature=1.0)], family="law", seed=2**40)
    assert both.of("a").token_ids != both.of("b").token_ids


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-42, 1e-300])
def test_the_lowest_temperatures_are_greedy(open_lane: OpenLane, temperature: float, method: Method) -> None:
    lane = open_lane("STANDALONE")
    done = run(drawn(lane.setup(family="law"), method), [ask(temperature=temperature, seed=1)]).of("a")
    assert done.token_ids == lane.target("law").greedy(PROMPT, 16)


@pytest.mark.parametrize(
    ("fields", "mend"),
    [
        ({"temperature": math.inf}, "finite"),
        ({"presence_penalty": math.nan}, "finite"),
        ({"frequency_penalty": -math.inf}, "finite"),
        ({"repetition_penalty": math.inf}, "finite"),
        ({"logit_bias": ((3, math.nan),)}, "finite, or -inf to ban a token"),
        ({"logit_bias": ((3, math.inf),)}, "finite, or -inf to ban a token"),
        ({"logit_bias": ((64, 1.0),)}, r"0\.\.63"),
        ({"stop_token_ids": (-1,)}, r"0\.\.63"),
        ({"logprobs": 65}, "vocabulary"),
        ({"max_new_tokens": 510}, "context_length="),
    ],
)
def test_requests_that_could_only_give_nonsense_are_refused(
    open_lane: OpenLane, fields: dict[str, Any], mend: str
) -> None:
    with pytest.raises(Refused, match=f"{next(iter(fields)).split('_new')[0]}.*{mend}"):
        open_lane("none").run([ask(**fields)])


def test_a_banned_token_never_comes(open_lane: OpenLane) -> None:
    done = open_lane("EAGLE").run([ask(logit_bias=((0, -math.inf),), max_new_tokens=40)], family="law").of("a")
    assert 0 not in done.token_ids


def test_the_same_id_twice_is_refused(open_lane: OpenLane) -> None:
    with pytest.raises(Refused, match=r"request_id='a'.*unique"):
        open_lane("none").run([ask(), ask()])


def test_a_script_has_no_law_to_draw_from(open_lane: OpenLane) -> None:
    """Taken for drawn from a law, its drafts would be kept whatever their probability."""
    with pytest.raises(Refused, match=r"draft_sample_method='probabilistic'.*CUSTOM must use 'greedy'"):
        run(drawn(open_lane("CUSTOM").setup(script=Constant(5)), "probabilistic"), [ask()])


def test_committed_tokens_must_leave_something_to_generate(open_lane: OpenLane) -> None:
    engine = LLMEngine(EngineConfig(model=open_lane("none").setup().target))
    with pytest.raises(ValueError, match=r"len\(committed_token_ids\)=2: must be fewer than max_new_tokens=2"):
        engine.add_request("a", PROMPT, EngineParams(max_new_tokens=2), committed_token_ids=(6, 7))
    assert not engine.has_unfinished


def test_prompt_logprobs_of_an_unfinished_prefill_are_left_out(open_lane: OpenLane) -> None:
    """Aborted after the first chunk: some of the rows are there, but not as many as the prompt has tokens."""
    sampling = SamplingParams(prompt_logprobs=1)
    request = Request(request_id="a", prompt_token_ids=(3, 4, 5, 6), sampling=sampling, abort_step=1)
    done = open_lane("EAGLE").run([request], chunk_size=2).of("a")
    assert (done.finish_reason, done.token_ids, done.prompt_logprobs) == ("abort", (), None)


@pytest.mark.parametrize("overlap", [False, True])
def test_trees_with_fewer_nodes_than_steps(open_lane: OpenLane, overlap: bool) -> None:
    """Four steps deep, but only two drafts are kept: no block is longer than three tokens, and no buffer either."""
    lane = open_lane("EAGLE-tree")
    setup = lane.setup(overlap=overlap)
    assert setup.drafter is not None
    small = replace(setup, drafter=replace(setup.drafter, num_steps=4, num_draft_tokens=3))
    observed = run(small, [ask(max_new_tokens=24)])
    assert judge(observed) == []
    assert observed.of("a").token_ids == lane.target().greedy(PROMPT, 24)
    assert max(observed.of("a").accept_lens or ()) == 3
