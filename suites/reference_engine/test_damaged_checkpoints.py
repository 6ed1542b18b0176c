"""Checkpoints that were cut, mixed up or edited by hand are refused: with the file or the key, its value and the mend.

What fits and is wrong (a tensor of another target) is for CONF-2; here nothing can be read at all, or is no model.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.contract import DrafterSetup, EngineSetup, Refused
from harness.engines import engine_factory
from harness.workloads.random_checkpoints import edit_config
from suites.reference_engine.conftest import OpenLane
from suites.registration import suite

suite(seconds=1.5, stage="cpu", needs="cpu")

WEIGHTS, INDEX, CONFIG, TOKENIZER = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("config.json", "tokenizer.json"),
)


@pytest.fixture
def copies(open_lane: OpenLane, tmp_path: Path) -> Callable[[str], EngineSetup]:
    """The set-up of a lane on copies of its checkpoints, `target` and `drafter` in `tmp_path`."""

    def make(name: str) -> EngineSetup:
        setup = open_lane(name).setup()
        shutil.copytree(setup.target, tmp_path / "target")
        drafter = None
        if setup.drafter is not None and setup.drafter.model is not None:
            shutil.copytree(setup.drafter.model, tmp_path / "drafter")
            drafter = DrafterSetup.chain(setup.drafter.method, 3, tmp_path / "drafter")
        return EngineSetup(target=tmp_path / "target", drafter=drafter)

    return make


def refused(setup: EngineSetup, *words: str) -> None:
    with pytest.raises(Refused, match=".*".join(map(re.escape, words))):
        engine_factory("reference").start(setup)


@pytest.mark.parametrize("kept", [0, 5, 300, -3])
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_weights_that_were_cut(copies: Callable[[str], EngineSetup], tmp_path: Path, which: str, kept: int) -> None:
    setup, file = copies("EAGLE"), tmp_path / which / WEIGHTS
    file.write_bytes(file.read_bytes()[:kept])
    refused(setup, f"{file}: is no whole safetensors file", "copy it again")


def test_weights_of_another_form(copies: Callable[[str], EngineSetup], tmp_path: Path) -> None:
    setup, file = copies("none"), tmp_path / "target" / WEIGHTS
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(setup, f"{file}: is no whole safetensors file")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (CONFIG, "{", "is no JSON"),
        (CONFIG, "", "is no JSON"),
        (CONFIG, "[]", "holds a list, must be an object"),
        (CONFIG, "null", "holds a NoneType, must be an object"),
        pytest.param(CONFIG, "[" * 100_000, "is no JSON", id="deep"),
        (INDEX, "{", "is no JSON"),
        (INDEX, "{}", "weight_map=None: must say"),
        (INDEX, '{"weight_map": ["a"]}', "weight_map=['a']: must say"),
        (INDEX, '{"weight_map": {"a": "gone.safetensors"}}', "weight_map names gone.safetensors"),
        (TOKENIZER, "{", "is no tokenizer"),
        (TOKENIZER, "[]", "is no tokenizer"),
    ],
)
def test_files_that_cannot_be_read(
    copies: Callable[[str], EngineSetup], tmp_path: Path, name: str, text: str, words: str
) -> None:
    setup, file = copies("none"), tmp_path / "target" / name
    file.write_text(text)
    refused(setup, f"{file}: {words}")


def test_bytes_that_are_no_text(copies: Callable[[str], EngineSetup], tmp_path: Path) -> None:
    setup, file = copies("none"), tmp_path / "target" / CONFIG
    file.write_bytes(b"\xff\xfe{}")
    refused(setup, f"{file}: is no JSON")


EAGLE3_LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("name", "key", "value", "mend"),
    [
        ("none", "architectures", "LlamaForCausalLM", "must be a list"),
        ("none", "rms_norm_eps", "small", "must be a positive number"),
        ("none", "rms_norm_eps", 0, "must be a positive number"),
        ("none", "rope_theta", None, "must be a positive number"),
        ("none", "rope_theta", 0, "must be a positive number"),
        ("none", "rope_scaling", "yes", "must be an object"),
        ("none", "head_dim", -2, "must be a positive integer"),
        ("none", "eos_token_id", "2", "must be ids in 0..63"),
        ("none", "eos_token_id", 64, "must be ids in 0..63"),
        ("none", "eos_token_id", [1, "x"], "must be ids in 0..63"),
        ("none", "tie_word_embeddings", "no", "must be true or false"),
        ("EAGLE3", EAGLE3_LAYERS, ["a"], "must list layers"),
        ("EAGLE3", EAGLE3_LAYERS, 3, "must list layers"),
        ("EAGLE3", "draft_vocab_size", "x", "must be an integer"),
        ("DFLASH", "dflash_config", "x", "must be an object"),
        ("DFLASH", "dflash_config", {"mask_token_id": 1, "target_layer_ids": 3}, "must name layers of the target"),
        ("FROZEN_KV_MTP", "target_kv_layer_ids", 7, "must name 1 of the target's layers"),
    ],
)
def test_keys_that_no_model_has(
    copies: Callable[[str], EngineSetup], tmp_path: Path, name: str, key: str, value: object, mend: str
) -> None:
    """A rotary base of 0 makes every row NaN, and an EOS id that is a text never comes: nothing else says so."""
    setup = copies(name)
    edit_config(tmp_path / ("target" if name == "none" else "drafter"), **{key: value})
    shown = 3 if isinstance(value, dict) else value
    refused(setup, "config.json" if name in ("none", "EAGLE3") else str(tmp_path), f"={shown!r}", mend)
