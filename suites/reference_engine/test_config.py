"""Configuration: every mistake is refused with its field, its value and the mend."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from harness.contract import EngineSetup, Refused
from harness.engines import engine_factory
from reference_engine import EngineConfig, LLMEngine, SamplingParams, SpecConfig
from suites.reference_engine.conftest import OpenLane
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")

CHAIN: dict[str, Any] = {"method": "EAGLE", "num_steps": 3, "num_draft_tokens": 4}
TREE: dict[str, Any] = {"method": "EAGLE", "num_steps": 3, "topk": 2, "num_draft_tokens": 6}

WRONG_SPECS: list[tuple[dict[str, Any], str, str]] = [
    (CHAIN | {"num_steps": 0}, "num_steps=0", "at least 1"),
    (CHAIN | {"topk": 0}, "topk=0", "at least 1"),
    (CHAIN | {"num_draft_tokens": 3}, "num_draft_tokens=3", "num_steps + 1 = 4"),
    (CHAIN | {"num_draft_tokens": 5}, "num_draft_tokens=5", "num_steps + 1 = 4"),
    (TREE | {"num_draft_tokens": 12}, "num_draft_tokens=12", "2..11"),
    (TREE | {"num_draft_tokens": 1}, "num_draft_tokens=1", "2..11"),
    (CHAIN | {"draft_sample_method": "maybe"}, "draft_sample_method='maybe'", "'greedy' or 'probabilistic'"),
    (TREE | {"draft_sample_method": "probabilistic"}, "draft_sample_method='probabilistic'", "'greedy' with topk > 1"),
]

WRONG_ENGINES: list[tuple[dict[str, Any], str, str]] = [
    ({"dtype": "float16"}, "dtype='float16'", "float32, float64, bfloat16"),
    ({"context_length": 0}, "context_length=0", "at least 1"),
    ({"page_size": 0}, "page_size=0", "at least 1"),
    ({"max_running": 0}, "max_running=0", "at least 1"),
    ({"chunk_size": 0}, "chunk_size=0", "at least 1"),
    ({"num_pages": -1}, "num_pages=-1", "0 (automatic) or positive"),
    ({"batch_buckets": (0, 8)}, "batch_buckets=(0, 8)", "positive"),
    ({"batch_buckets": (2, 4)}, "batch_buckets=(2, 4)", "reach max_running (8)"),
    ({"spec": SpecConfig(**CHAIN), "context_length": 4}, "num_draft_tokens=4", "below context_length (4)"),
]

WRONG_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature=-0.1: must be 0 (greedy) or positive"),
    ({"temperature": float("nan")}, "temperature=nan: must be 0 (greedy) or positive"),
    ({"top_k": -1}, "top_k=-1: must be 0 (off) or positive"),
    ({"top_p": 0.0}, "top_p=0.0: must lie in (0, 1]"),
    ({"top_p": 1.1}, "top_p=1.1: must lie in (0, 1]"),
    ({"min_p": 1.0}, "min_p=1.0: must lie in [0, 1)"),
    ({"max_new_tokens": 0}, "max_new_tokens=0: must be at least 1"),
    ({"min_new_tokens": 17}, "min_new_tokens=17: must lie in 0..max_new_tokens (16)"),
    ({"logprobs": -1}, "logprobs=-1: must be None (off) or >= 0"),
    ({"prompt_logprobs": -2}, "prompt_logprobs=-2: must be None (off) or >= 0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be positive"),
    ({"stop": ("",)}, "stop=('',): stop strings must not be empty"),
    ({"n": 0}, "n=0: must be at least 1"),
]


@pytest.mark.parametrize(("values", "named", "mend"), WRONG_SPECS)
def test_drafts_that_do_not_add_up(values: dict[str, Any], named: str, mend: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named) + ".*" + re.escape(mend)):
        SpecConfig(**values)


@pytest.mark.parametrize(("values", "named", "mend"), WRONG_ENGINES)
def test_engines_that_could_not_run(values: dict[str, Any], named: str, mend: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named) + ".*" + re.escape(mend)):
        EngineConfig(model=Path("anywhere"), **values)


@pytest.mark.parametrize(("values", "message"), WRONG_REQUESTS)
def test_requests_that_make_no_sense(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("kind", "key", "mend"),
    [
        (SpecConfig, "num_step", "did you mean 'num_steps'?"),
        (SpecConfig, "top_k", "did you mean 'topk'?"),
        (EngineConfig, "pagesize", "did you mean 'page_size'?"),
        (EngineConfig, "zzz", "known keys are model, spec, dtype"),
    ],
)
def test_unknown_keys_get_a_suggestion(kind: Any, key: str, mend: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"unknown configuration key {key!r} for {kind.__name__}: {mend}")):
        kind.from_dict({key: 1})


def test_a_mapping_makes_the_same_configuration() -> None:
    assert SpecConfig.from_dict(CHAIN) == SpecConfig(**CHAIN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "NONE-SUCH"}, "method='NONE-SUCH': known drafters are STANDALONE, EAGLE, EAGLE3, MTP"),
        ({"model": None}, "model=None: EAGLE needs the folder of its draft head"),
        ({"model": None, "method": "STANDALONE"}, "model=None: STANDALONE needs the folder of a draft model"),
        ({"model": None, "method": "EAGLE3"}, "model=None: EAGLE3 needs the folder of its draft head"),
        ({"model": None, "method": "CUSTOM"}, "script=None: CUSTOM needs a function"),
        ({"model": None, "method": "MTP"}, "num_nextn_predict_layers is 0 or missing"),
        ({"method": "STANDALONE"}, "LlamaForCausalLMEagle is a drafter"),
        ({"method": "EAGLE3"}, "architectures='LlamaForCausalLMEagle' is not an EAGLE3 head"),
    ],
)
def test_drafters_that_cannot_be_loaded(open_lane: OpenLane, changes: dict[str, Any], message: str) -> None:
    setup = open_lane("EAGLE").setup()
    assert setup.drafter is not None
    with pytest.raises(Refused, match=re.escape(message)):
        engine_factory("reference").start(
            dataclasses.replace(setup, drafter=dataclasses.replace(setup.drafter, **changes))
        )


def test_sizes_that_do_not_fit_the_target(open_lane: OpenLane) -> None:
    target = open_lane("none").setup().target
    with pytest.raises(Refused, match=r"context_length=4096: must not exceed max_position_embeddings \(2048\)"):
        engine_factory("reference").start(EngineSetup(target=target, context_length=4096))
    engine = LLMEngine(EngineConfig(model=target, num_pages=2, page_size=4))
    with pytest.raises(
        ValueError, match=r"num_pages=2: must be at least 4 for this request \(13 tokens and 3 of slack"
    ):
        engine.add_request("a", (3, 4, 5), SamplingParams(max_new_tokens=10))
    assert not engine.has_unfinished


def test_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json there; give the folder of a Hugging Face checkpoint"):
        LLMEngine(EngineConfig(model=tmp_path))


def test_a_running_id_cannot_be_used_again(open_lane: OpenLane) -> None:
    engine = LLMEngine(EngineConfig(model=open_lane("none").setup().target))
    engine.add_request("a", (3, 4, 5))
    with pytest.raises(ValueError, match="request_id='a': is already running; ids must be unique"):
        engine.add_request("a", (3, 4, 5))


def test_stop_strings_need_a_tokenizer(open_lane: OpenLane, tmp_path: Path) -> None:
    for file in open_lane("none").setup().target.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    engine = LLMEngine(EngineConfig(model=tmp_path))
    with pytest.raises(ValueError, match=r"stop=\('a',\): stop strings need a tokenizer\.json beside"):
        engine.add_request("a", (3, 4, 5), SamplingParams(stop=("a",)))
