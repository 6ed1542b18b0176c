"""FROZEN_KV_MTP: the assistant leaves the target's KV as it is, and is refused where it could not read it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.contract import EngineSetup, Refused
from harness.engines import engine_factory
from harness.engines.reference import ReferenceEngine
from reference_engine.drafters.base import Proposal, ProposeInputs
from suites.reference_engine.conftest import OpenLane
from suites.reference_engine.support import ask
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")

SCHEDULE: dict[str, Any] = {"chunk_size": 3, "num_pages": 18, "page_size": 4, "overlap": True, "batch_buckets": (3, 8)}
"""Chunks, preemptions, padded rows: everything that could make a drafter write where it should not."""


def test_the_targets_kv_is_bit_for_bit_what_it_was(open_lane: OpenLane) -> None:
    """All pages of all layers, before and after every call of the drafter. It has no cache of its own."""
    lane = open_lane("FROZEN_KV_MTP")
    setup = lane.setup(family="census", **SCHEDULE)
    engine = engine_factory("reference").start(setup)
    assert isinstance(engine, ReferenceEngine)
    drafter, layers = engine.engine.drafter, engine.engine.cache.layers
    assert drafter is not None
    assert drafter.caches() == []
    assert drafter.lookahead == 0
    propose, calls = drafter.propose, 0

    def watch(inputs: ProposeInputs) -> Proposal:
        nonlocal calls
        before = [layer.pages.clone() for layer in layers]
        proposal = propose(inputs)
        assert all(torch.equal(layer.pages, pages) for layer, pages in zip(layers, before, strict=True))
        calls += 1
        return proposal

    drafter.propose = watch  # type: ignore[method-assign]
    target = lane.target("census")
    batch = [ask(f"r{i}", target.prompt(2 + 3 * i, i, owner=i), max_new_tokens=12) for i in range(4)]
    run = engine.run(batch)
    assert sum(len(step.preempted) for step in run.steps) > 0
    assert calls > 20
    for done in run.completions:
        assert done.token_ids == target.greedy(done.prompt_token_ids, 12)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures='LlamaForCausalLM' is not a frozen-KV assistant"),
        ({"num_key_value_heads": 1}, "num_kv_heads=1 must equal the target's 2"),
        ({"rope_theta": 5000.0}, "rope_theta=5000.0 must equal the target's 10000.0"),
        ({"backbone_hidden_size": 64}, "backbone_hidden_size=64 must equal the target's 128"),
        ({"target_kv_layer_ids": [4]}, "target_kv_layer_ids=[4]: must name 1 of the target's layers 0..3"),
        ({"target_kv_layer_ids": [0, 1]}, "target_kv_layer_ids=[0, 1]: must name 1 of the target's layers 0..3"),
        ({"num_hidden_layers": 2}, "target_kv_layer_ids=[3]: must name 2 of the target's layers 0..3"),
        ({"attention_bias": True}, "tensor 'model.layers.0.self_attn.q_proj.bias' is missing"),
    ],
)
def test_an_assistant_that_does_not_fit(open_lane: OpenLane, tmp_path: Path, keys: Any, message: str) -> None:
    setup = open_lane("FROZEN_KV_MTP").setup()
    with pytest.raises(Refused, match=re.escape(message)):
        engine_factory("reference").start(edited(setup, tmp_path, keys))


def edited(setup: EngineSetup, tmp_path: Path, keys: dict[str, Any]) -> EngineSetup:
    """The set-up with a copy of its drafter that has other configuration keys."""
    assert setup.drafter is not None
    assert setup.drafter.model is not None
    copy = tmp_path / "assistant"
    shutil.copytree(setup.drafter.model, copy)
    config = json.loads((copy / "config.json").read_text()) | keys
    (copy / "config.json").write_text(json.dumps(config))
    return replace(setup, drafter=replace(setup.drafter, model=copy))


def test_a_tree_is_declined(open_lane: OpenLane) -> None:
    setup = open_lane("FROZEN_KV_MTP").setup()
    assert setup.drafter is not None
    with pytest.raises(Refused, match="topk=2: FROZEN_KV_MTP drafts chains only"):
        engine_factory("reference").start(replace(setup, drafter=replace(setup.drafter, topk=2, num_draft_tokens=5)))
