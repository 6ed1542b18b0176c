"""MEDUSA heads: their two layouts, what is refused at start-up, and the law that sampled drafts are drawn from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.contract import DrafterSetup, EngineSetup, Refused
from harness.engines import engine_factory
from harness.engines.reference import ReferenceEngine
from harness.known_answer.drafters.medusa import NUM_HEADS, MarkovMedusa
from harness.known_answer.markov import MarkovTarget
from reference_engine.drafters.base import Proposal, ProposeInputs
from suites.reference_engine.conftest import OpenLane
from suites.reference_engine.support import ask, drawn, run
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")


@pytest.fixture
def heads(open_lane: OpenLane, tmp_path: Path) -> tuple[EngineSetup, DrafterSetup, Path]:
    """A set-up, its drafter and a copy of the heads to be changed."""
    setup = open_lane("MEDUSA").setup(family="law")
    assert setup.drafter is not None
    assert setup.drafter.model is not None
    copy = tmp_path / "heads"
    shutil.copytree(setup.drafter.model, copy)
    return replace(setup, drafter=replace(setup.drafter, model=copy)), setup.drafter, copy


def edit(directory: Path, **keys: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def rename(directory: Path, renamed: Callable[[str], str], file: str = "model.safetensors") -> None:
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    save_file({renamed(name): tensor for name, tensor in weights.items()}, directory / file, metadata={"format": "pt"})


def faster_decoding(name: str) -> str:
    part, head, *rest = name.split(".")
    return f"{head}.0.linear.{rest[-1]}" if part == "blocks" else f"{head}.1.weight"


def test_both_layouts_are_loaded(heads: tuple[EngineSetup, DrafterSetup, Path]) -> None:
    setup, original, copy = heads
    rename(copy, faster_decoding, "medusa_lm_head.safetensors")
    edit(
        copy,
        **dict.fromkeys(("num_heads", "num_hidden_layers", "architectures", "hidden_size", "medusa_fc_bias")),
        medusa_num_heads=NUM_HEADS,
        medusa_num_layers=1,
    )
    batch = [ask("a", max_new_tokens=12), ask("b", (7, 9), max_new_tokens=12)]
    runs = [run(one, batch) for one in (setup, replace(setup, drafter=original))]
    lens = [[done.accept_lens for done in one.completions] for one in runs]
    assert lens[0] == lens[1]
    assert max(length for ragged in lens[0] for length in ragged or ()) > 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_heads": 2}, "num_steps=3: must not exceed the 2 heads"),
        ({"num_heads": NUM_HEADS - 1}, "tensors that this architecture does not have: blocks.7.layers.0.bias"),
        ({"num_heads": NUM_HEADS + 1}, "tensor 'blocks.8.layers.0.bias' is missing"),
        ({"num_heads": None}, "num_heads=None must be a positive integer"),
        ({"num_hidden_layers": 2}, "tensor 'blocks.0.layers.1.bias' is missing"),
        ({"medusa_fc_bias": False}, "blocks.0.layers.0.bias"),
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is not a set of MEDUSA heads"),
        ({"hidden_size": 64}, "hidden_size=64 must equal the target's 32"),
        ({"truncated_vocab_size": 8}, "truncated_vocab_size=8"),
        ({"original_lm_head": True}, "original_lm_head=True is not supported"),
    ],
)
def test_heads_that_do_not_fit(heads: tuple[EngineSetup, DrafterSetup, Path], keys: Any, message: str) -> None:
    setup, _, copy = heads
    edit(copy, **keys)
    with pytest.raises(Refused, match=re.escape(message)):
        engine_factory("reference").start(setup)


def test_a_tree_is_declined_and_heads_are_no_target(heads: tuple[EngineSetup, DrafterSetup, Path]) -> None:
    setup, original, copy = heads
    with pytest.raises(Refused, match="topk=2: MEDUSA drafts chains only"):
        engine_factory("reference").start(replace(setup, drafter=replace(original, topk=2, num_draft_tokens=5)))
    with pytest.raises(Refused, match="is a set of draft heads, not a model"):
        engine_factory("reference").start(replace(setup, target=copy, drafter=None))


def test_sampled_drafts_are_weighed_by_the_law_that_they_are_drawn_from(open_lane: OpenLane) -> None:
    """Each head's softmax at the request's temperature; a greedy request's is one-hot."""
    lane = open_lane("MEDUSA")
    closed = lane.drafter("law")
    assert isinstance(closed, MarkovMedusa)
    assert isinstance(closed.target, MarkovTarget)
    engine = engine_factory("reference").start(drawn(lane.setup(family="law"), "probabilistic"))
    assert isinstance(engine, ReferenceEngine)
    drafter = engine.engine.drafter
    assert drafter is not None
    seen: list[tuple[ProposeInputs, Proposal]] = []
    propose = drafter.propose

    def watch(inputs: ProposeInputs) -> Proposal:
        seen.append((inputs, propose(inputs)))
        return seen[-1][1]

    drafter.propose = watch  # type: ignore[method-assign]
    temperatures = (0.7, 1.6, 0.0)
    engine.run([ask(f"r{i}", (3 + i, 9), temperature=t, seed=i, max_new_tokens=6) for i, t in enumerate(temperatures)])
    compared = 0
    for inputs, proposal in seen[:2]:
        assert proposal.probs is not None
        for row, request_id in enumerate(inputs.request_ids):
            last = int(inputs.token_ids[row, inputs.num_rows[row] - 1])
            temperature = temperatures[int(request_id[1:])]
            for head in range(3):
                law = closed.target.log_law[:, closed.stand_ins[head][last]]
                right = (law / temperature).softmax(0) if temperature else (law == law.max()).double()
                torch.testing.assert_close(proposal.probs[row, head].double(), right, atol=2e-6, rtol=0)
                compared += 1
    assert compared >= 12
