"""What transformers cannot do with a checkpoint is refused with the field, the value and the mend, before anything
runs. What it has no word for at all: test_transformers_dialect.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.contract import Action, DrafterSetup, Engine, Refused, Request, SamplingParams
from harness.engines import ENGINES, engine_factory
from harness.workloads.random_checkpoints import EOS_TOKEN_ID, edit_config, encode, random_checkpoint
from suites.engines.conftest import Start
from suites.registration import suite

suite(seconds=0.8, stage="cpu", needs="cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("target"), seed=0, num_hidden_layers=1)


@pytest.fixture(scope="module")
def engine(start: Start, target: Path) -> Engine:
    return start(target, context_length=64)


def test_actions(engine: Engine) -> None:
    with pytest.raises(Refused, match="pause: nothing can be done to transformers"):
        engine.run([], actions=[Action(step=0, name="pause")])


def test_registry_names_its_engines() -> None:
    assert {"reference", "transformers"} <= set(ENGINES)
    with pytest.raises(ValueError, match=r"engine='vllm9': must be one of .*transformers"):
        engine_factory("vllm9")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"target": Path("nowhere")}, "target=nowhere"),
        ({"drafter": DrafterSetup.chain("STANDALONE", 3, Path("nowhere"))}, "drafter.model=nowhere"),
    ],
)
def test_checkpoints_that_are_not_there(start: Start, target: Path, change: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused, match=f"{field}: there is no config.json"):
        start(**{"target": target, **change})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sampling": {"bad_words": ((EOS_TOKEN_ID,),)}}, "bad_words"),
        ({"sampling": {"max_new_tokens": 60}}, "prompt \\+ max_new_tokens = 65 exceeds the context of 64"),
        ({"sampling": {"logit_bias": ((96, 1.0),)}}, r"\[96\] lie outside the vocabulary of 96"),
        ({"prompt_token_ids": (3, 200)}, r"\[200\] lie outside the vocabulary"),
        ({"prompt_token_ids": (3, -1)}, r"\[-1\] lie outside the vocabulary"),
    ],
)
def test_requests(engine: Engine, change: dict[str, Any], field: str) -> None:
    sampling = SamplingParams(**{"max_new_tokens": 4, **change.pop("sampling", {})})
    good = Request(request_id="good", prompt_token_ids=encode("Hello"))
    bad = Request(**{"request_id": "bad", "prompt_token_ids": encode("Hello"), "sampling": sampling, **change})
    with pytest.raises(Refused, match=f"request 'bad': .*{field}"):
        engine.run([good, bad])


ASKING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "seed": {"temperature": 1.0, "seed": 1},
    "n": {"temperature": 1.0, "n": 2},
    "greedy_n": {"n": 2},
    "stop": {"stop": ("a",)},
    "stop_token_ids": {"stop_token_ids": (5,)},
    "logprobs": {"logprobs": 1},
}


@pytest.mark.parametrize("drafts", [None, "greedy", "probabilistic", "lookup"])
def test_what_is_claimed_is_done_and_the_rest_refused(start: Start, target: Path, drafts: Any) -> None:
    """A drafter takes features away; the harness asks for those alone that the engine claims as it was started."""
    drafter = drafts and DrafterSetup.chain("STANDALONE", 2, target, draft_sample_method=drafts)
    if drafts == "lookup":
        drafter = DrafterSetup.chain("NGRAM", 2, prompt_lookup_min=1, prompt_lookup_max=3)
    engine = start(target, drafter)
    refused = set()
    for feature, fields in ASKING.items():
        sampling = SamplingParams(max_new_tokens=4, **fields)
        try:
            engine.run([Request(request_id="r", prompt_token_ids=encode("Hello"), sampling=sampling)])
        except Refused:
            refused.add(feature)
    assert refused == set(ASKING) - engine.capabilities.features


def test_stop_strings_need_a_tokenizer(start: Start, target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    engine = start(tmp_path)
    (done,) = engine.run([Request(request_id="r", prompt_token_ids=(1, 2))]).completions
    assert done.text is None
    with pytest.raises(Refused, match="no tokenizer"):
        engine.run([Request(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(stop=("a",)))])


@pytest.mark.parametrize("fault", ["missing", "extra", "misshapen", "unknown architecture", "other vocabulary"])
def test_checkpoints_that_do_not_fit(start: Start, target: Path, tmp_path: Path, fault: str) -> None:
    shutil.copytree(target, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.0.mlp.up_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        name = "model.layers.0.mlp.upper_proj.weight"
        tensors[name] = torch.zeros(2, 2)
    elif fault == "misshapen":
        tensors[name] = tensors[name][:-1].clone()
    elif fault == "unknown architecture":
        name = "mystery"
        edit_config(tmp_path, model_type=name)
    else:
        name = "model.embed_tokens.weight"
        edit_config(tmp_path, vocab_size=90)
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(Refused, match=name):
        start(tmp_path)


def test_a_drafter_of_another_vocabulary(start: Start, target: Path, tmp_path: Path) -> None:
    draft = random_checkpoint(tmp_path, seed=1, num_hidden_layers=1, vocab_size=100)
    with pytest.raises(Refused, match="vocabulary of 100 differs from the target's 96"):
        start(target, DrafterSetup.chain("STANDALONE", 2, draft))
