"""CONF: what an engine cannot do it declines at the door, by name, and whoever is inside notices nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.contract import DrafterSetup, Engine, EngineSetup, Refused, Request, SamplingParams
from harness.invariants import count_1, equal_1, kv_1, law_1, logp_1
from harness.workloads.lane import Lane, step_bound
from harness.workloads.lanes import LANES, factory_of
from harness.workloads.laws import RequestedLaw
from harness.workloads.mutilate import FAULTS, mutilate, unknown_architecture
from harness.workloads.scenarios import plain
from suites.conformance.arrange import WALK, RecordExamples, run_sampled, sampled_batch
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=1.1, stage="cpu", needs="cpu")

OWN_CHECKPOINT = [name for name, spec in LANES.items() if spec.loads_checkpoint]
UNDRAWN = [name for name, spec in LANES.items() if spec.speculative and not spec.draws]
PROMPT = WALK.prompt(6, 0)
BAD_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "id_too_big": ("prompt_token_ids", {"prompt_token_ids": (*PROMPT, WALK.vocab_size)}),
    "id_negative": ("prompt_token_ids", {"prompt_token_ids": (-1, *PROMPT)}),
    "prompt_too_long": ("prompt_token_ids", {"prompt_token_ids": WALK.prompt(90, 3)}),
    "bias_outside": ("logit_bias", {"sampling": SamplingParams(logit_bias=((WALK.vocab_size, 1.0),))}),
    "bad_word_outside": ("bad_words", {"sampling": SamplingParams(bad_words=((3, WALK.vocab_size),))}),
    "allowed_outside": ("allowed_token_ids", {"sampling": SamplingParams(allowed_token_ids=(3, -1))}),
    "regex_broken": ("regex", {"sampling": SamplingParams(regex="[a-")}),
    "regex_unsayable": ("regex", {"sampling": SamplingParams(regex="~a")}),
    "schema_broken": ("json_schema", {"sampling": SamplingParams(json_schema="{")}),
    "two_grammars": ("regex", {"sampling": SamplingParams(json_schema='{"type": "null"}', regex="a")}),
    "endless_grammar": ("ignore_eos", {"sampling": SamplingParams(regex="a", ignore_eos=True)}),
}
BAD_SETUPS: dict[str, Any] = {
    "page_size": 0,
    "num_pages": -1,
    "chunk_size": 0,
    "max_running": 0,
    "context_length": 0,
    "batch_buckets": (1, 2),
    "dtype": "float12",
}


def _request(request_id: str, **fields: Any) -> Request:
    return Request(**({"request_id": request_id, "prompt_token_ids": PROMPT} | fields))


@pytest.mark.invariant("CONF-1")
def test_drafter_works_or_is_declined(lane: Lane) -> None:
    """An engine that claims the drafter must run it; one that does not must say so at start-up."""
    claimed = lane.spec.method is None or lane.spec.method in lane.capabilities.drafters
    requests = plain(WALK, (3, 7), (8, 8))
    if claimed:
        lane.check(equal_1(lane.run(requests), lane.baseline(requests)))
        return
    with pytest.raises(Refused, match=re.escape(str(lane.spec.method))):
        factory_of(lane.engine).start(lane.setup())
    with lane.start():
        pass


@pytest.mark.invariant("CONF-1")
@pytest.mark.parametrize("name", tiered(BAD_REQUESTS, "id_too_big", "prompt_too_long", "regex_unsayable"))
def test_bad_request_is_declined_before_anyone_is_touched(lane: Lane, name: str) -> None:
    field, fields = BAD_REQUESTS[name]
    pattern = field if lane.capabilities.grey_box else "."
    good = plain(WALK, (3, 7, 12), (8, 8, 8))
    with lane.start(context_length=64) as engine:
        if not _given_up(engine, [*good, _request("bad", **fields)]):
            with pytest.raises(ValueError, match=pattern):
                engine.run([*good, _request("bad", **fields)])
        run = engine.run(good)
    lane.check(count_1(run) + equal_1(run, lane.baseline(good, context_length=64)))
    if lane.capabilities.grey_box:
        lane.check(kv_1(run))


def _given_up(engine: Engine, requests: list[Request]) -> bool:
    """Whether a black box took the bad request, and said afterwards that it could not serve it."""
    if engine.capabilities.grey_box:
        return False
    try:
        return engine.run(requests).of("bad").finish_reason == "error"
    except ValueError:
        return False


@pytest.mark.invariant("CONF-1")
@pytest.mark.parametrize("field", BAD_SETUPS)
def test_bad_setup_is_declined(lane: Lane, field: str) -> None:
    lane.knock()
    if not lane.capabilities.grey_box and field not in lane.capabilities.features:
        raise Refused(f"{field}: engine={lane.engine} does not claim to have it")
    setup = replace(lane.setup(), **{field: BAD_SETUPS[field]})
    _declined(lane, setup, field)


@pytest.mark.invariant("CONF-1")
def test_pool_too_small_for_a_request(lane: Lane) -> None:
    if not lane.capabilities.grey_box:
        raise Refused(f"num_pages: engine={lane.engine} does not claim to have pages")
    with lane.start(page_size=4, num_pages=10) as engine:
        with pytest.raises(ValueError, match="num_pages"):
            engine.run(plain(WALK, (40,), (20,)))
        run = engine.run(plain(WALK, (2,), (3,)))
    lane.check(count_1(run))


@pytest.mark.invariant("CONF-1")
@pytest.mark.drafters(*UNDRAWN)
def test_drafts_that_no_law_can_draw_are_declined(lane: Lane) -> None:
    """Or else they are as good as any others."""
    lane.claims("greedy")
    setup = lane.setup(draft_sample_method="probabilistic")
    try:
        factory_of(lane.engine).start(setup).close()
    except Refused:
        _declined(lane, setup, "draft_sample_method='probabilistic'" if lane.capabilities.grey_box else ".")
        return
    run, target = run_sampled(lane, sampled_batch(lane, "probabilistic"), "probabilistic"), lane.target("law")
    lane.check(law_1(run, RequestedLaw(target, lane.capabilities)) + logp_1(run, target.logprobs))


@pytest.mark.invariant("CONF-1")
def test_in_a_pool_of_any_size_a_request_is_declined_or_ends(lane: Lane, record_examples: RecordExamples) -> None:
    """From room for less than its tokens to plenty, drafts and windows included: none is let in to wait for ever."""
    if not lane.capabilities.grey_box:
        raise Refused(f"num_pages: engine={lane.engine} does not claim to have pages")
    requests = plain(WALK, (9,), (12,))
    outcomes = []
    for num_pages in range(5, 14):
        with lane.start(page_size=4, num_pages=num_pages) as engine:
            try:
                run = engine.run(requests, max_steps=step_bound(requests))
            except ValueError as refusal:
                outcomes.append("declined" if "num_pages" in str(refusal) else str(refusal))
                continue
        assert run.idle, f"num_pages={num_pages}: the request was let in, and never ends"
        lane.check(equal_1(run, lane.baseline(requests)))
        outcomes.append("ends")
        record_examples(1)
    assert outcomes == sorted(outcomes), f"a larger pool takes less: {outcomes}"
    assert set(outcomes) == {"declined", "ends"}, outcomes


@pytest.mark.invariant("CONF-1")
def test_unknown_drafter_is_declined(lane: Lane) -> None:
    _declined(lane, replace(lane.setup(), drafter=DrafterSetup.chain("NO-SUCH-METHOD", 3)), "NO-SUCH-METHOD")


@pytest.mark.invariant("CONF-2")
@pytest.mark.parametrize("fault", FAULTS)
def test_broken_target_is_declined(lane: Lane, fault: str, tmp_path: Path) -> None:
    setup = lane.setup()
    _declined(lane, replace(setup, target=mutilate(setup.target, tmp_path / "broken", FAULTS[fault])))


@pytest.mark.invariant("CONF-2")
@pytest.mark.drafters(*OWN_CHECKPOINT)
@pytest.mark.parametrize("fault", FAULTS)
def test_broken_drafter_is_declined(lane: Lane, fault: str, tmp_path: Path) -> None:
    setup = lane.setup()
    assert setup.drafter is not None
    assert setup.drafter.model is not None
    broken = mutilate(setup.drafter.model, tmp_path / "broken", FAULTS[fault])
    _declined(lane, replace(setup, drafter=replace(setup.drafter, model=broken)))


@pytest.mark.invariant("CONF-2")
@pytest.mark.drafters(*OWN_CHECKPOINT)
def test_foreign_drafter_is_declined(lane: Lane) -> None:
    """A drafter of a target with another vocabulary."""
    _declined(lane, replace(lane.setup(), drafter=lane.setup(family="law").drafter))


@pytest.mark.invariant("CONF-2")
def test_unknown_architecture_is_declined(lane: Lane, tmp_path: Path) -> None:
    setup = lane.setup()
    unknown = unknown_architecture(setup.target, tmp_path / "unknown")
    _declined(lane, replace(setup, target=unknown), "NobodyForCausalLM|nobody")


@pytest.mark.invariant("CONF-2")
def test_no_checkpoint_is_declined(lane: Lane, tmp_path: Path) -> None:
    _declined(lane, replace(lane.setup(), target=tmp_path / "nowhere"), "nowhere")


def _declined(lane: Lane, setup: EngineSetup, pattern: str = ".") -> None:
    with pytest.raises(ValueError, match=pattern) as caught:
        factory_of(lane.engine).start(setup).close()
    assert str(caught.value).strip(), "the refusal gives no reason"
