"""DFLASH: one pass a step, KV that holds the target's features alone, and what is refused at start-up."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.contract import Refused
from harness.engines import engine_factory
from harness.engines.reference import ReferenceEngine
from suites.reference_engine.conftest import OpenLane
from suites.reference_engine.support import ask
from suites.registration import suite

suite(seconds=1.1, stage="cpu", needs="cpu")


def test_one_pass_a_step_whatever_k(open_lane: OpenLane) -> None:
    """And none for a chunk of a prefill from which nothing is drafted."""
    for k in (1, 3, 8):
        engine = engine_factory("reference").start(open_lane("DFLASH").setup(k=k, chunk_size=4, num_pages=40))
        prompt = open_lane("DFLASH").target().prompt(10, 1)
        steps = engine.run([ask("a", prompt, max_new_tokens=12)]).steps
        assert [step.draft_forwards for step in steps] == [0, 0] + [1] * (len(steps) - 2)


def test_a_draft_leaves_nothing_in_the_kv_of_committed_tokens(open_lane: OpenLane) -> None:
    """Bit for bit: the rows before the bonus token are the same before and after each later step."""
    lane = open_lane("DFLASH")
    engine = engine_factory("reference").start(lane.setup(family="census", snapshots=True))
    prompt = lane.target("census").prompt(5, 1)
    run = engine.run([ask("a", prompt, max_new_tokens=14)])
    kept = [step.snapshots[0].draft_kv for step in run.steps if step.snapshots]
    assert len(kept) > 3
    for earlier, later in itertools.pairwise(kept):
        assert earlier is not None
        assert later is not None
        assert len(later) > len(earlier) >= len(prompt)
        assert torch.equal(later[: len(earlier)], earlier)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures='Qwen3ForCausalLM' is not a DFLASH draft model"),
        ({"block_size": 3}, "num_steps=3: must be below block_size=3"),
        ({"block_size": None}, "block_size=None: must be an integer above 1"),
        ({"num_target_layers": 7}, "num_target_layers=7: the target has 4"),
        ({"hidden_size": 64}, "hidden_size=64: must equal the target's 128"),
        ({"mask_token_id": 64}, "dflash_config.mask_token_id=64: must be an id of the target's vocabulary (64)"),
        ({"target_layer_ids": [0, 4]}, "dflash_config.target_layer_ids=[0, 4]: must name layers of the target, 0..3"),
        ({"target_layer_ids": [0, 1]}, "tensor 'fc.weight' has shape [128, 384], expected [128, 256]"),
        ({"causal": True}, "dflash_config.causal=True: is not supported"),
    ],
)
def test_a_draft_model_that_does_not_fit(open_lane: OpenLane, tmp_path: Path, keys: Any, message: str) -> None:
    setup = open_lane("DFLASH").setup()
    assert setup.drafter is not None
    assert setup.drafter.model is not None
    copy = tmp_path / "dflash"
    shutil.copytree(setup.drafter.model, copy)
    config = json.loads((copy / "config.json").read_text())
    for key, value in keys.items():
        place = config["dflash_config"] if key in ("mask_token_id", "target_layer_ids", "causal") else config
        place[key] = value
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match=re.escape(message)):
        engine_factory("reference").start(replace(setup, drafter=replace(setup.drafter, model=copy)))


def test_a_tree_is_declined(open_lane: OpenLane) -> None:
    setup = open_lane("DFLASH").setup()
    assert setup.drafter is not None
    with pytest.raises(Refused, match="topk=2: DFLASH drafts chains only"):
        engine_factory("reference").start(replace(setup, drafter=replace(setup.drafter, topk=2, num_draft_tokens=5)))


def test_a_bonus_token_that_is_the_mask_token(open_lane: OpenLane) -> None:
    """EOS is the mask token here, and goes on being drafted from where it does not end the request."""
    for family in ("walk-eos", "census"):
        lane = open_lane("DFLASH")
        closed, engine = lane.drafter(family), engine_factory("reference").start(lane.setup(family=family))
        assert isinstance(engine, ReferenceEngine)
        target = closed.target
        prompt = (*target.prompt(6, 1), target.eos_token_id) if family == "census" else target.prompt(3, 1)
        run = engine.run([ask("a", prompt, max_new_tokens=70, ignore_eos=True)])
        assert run.of("a").accept_lens == closed.accept_lens(prompt, 70, 3)
