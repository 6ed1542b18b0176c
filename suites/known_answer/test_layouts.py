"""Checkpoints as they lie on disk: names, shapes and settings that public engines look for."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from harness.known_answer import build, family
from harness.known_answer.tokenizer import characters, text_of
from suites.known_answer.support import DTYPES
from suites.registration import suite

suite(seconds=0.9, stage="cpu", needs="cpu")

ATTENTION = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
MLP = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
BIASES = {f"self_attn.{name}_proj.bias" for name in "qkv"}
NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight"}
QK_NORMS = {f"self_attn.{name}_norm.weight" for name in "qk"}
MTP_NORMS = {f"{name}.weight" for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}


def below(prefix, names):
    return {f"{prefix}.{name}" for name in names}


def target_names(layers, extra=frozenset()):
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    return names.union(*(below(f"model.layers.{layer}", ATTENTION | MLP | NORMS | extra) for layer in range(layers)))


def mtp_names(layers):
    parts = ATTENTION | MLP | NORMS | MTP_NORMS | BIASES | {"input_proj.weight"}
    return target_names(2, BIASES).union(*(below(f"model.mtp_layers.{layer}", parts) for layer in range(layers)))


MEDUSA_PARTS = (("blocks", "layers.0.weight"), ("blocks", "layers.0.bias"), ("lm_heads", "weight"))
EAGLE = {"fc.weight", "embed_tokens.weight", "layers.0.post_attention_layernorm.weight"}
EAGLE |= below("layers.0", ATTENTION | MLP)
EAGLE3 = {"fc.weight", "embed_tokens.weight", "norm.weight", "lm_head.weight", "midlayer.hidden_norm.weight"}
EAGLE3 |= below("midlayer", ATTENTION | MLP | NORMS)
FROZEN = {"pre_projection.weight", "post_projection.weight", "model.norm.weight", "lm_head.weight"}
FROZEN |= below("model.layers.0", MLP | NORMS | {"self_attn.q_proj.weight", "self_attn.o_proj.weight"})
DFLASH = {"fc.weight", "hidden_norm.weight", "norm.weight"}.union(
    *(below(f"layers.{layer}", ATTENTION | MLP | NORMS | QK_NORMS) for layer in (0, 1))
)
HEADS = {f"{name}.{head}.{rest}" for head in range(8) for name, rest in MEDUSA_PARTS}
LAYOUTS = {
    "target": ("LlamaForCausalLM", target_names(4)),
    "standalone": ("LlamaForCausalLM", target_names(1)),
    "eagle": ("LlamaForCausalLMEagle", EAGLE),
    "eagle3": ("LlamaForCausalLMEagle3", EAGLE3),
    "mtp": ("MiMoForCausalLM", mtp_names(1)),
    "mtp3": ("MiMoForCausalLM", mtp_names(3)),
    "medusa": ("MedusaModel", HEADS),
    "dflash": ("DFlashDraftModel", DFLASH),
    "frozen_kv_mtp": ("LlamaForCausalLMFrozenKVMTP", FROZEN),
}


def read(directory):
    return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["walk", "walk-perfect", "census"])
def test_names_and_dtypes(checkpoints, name, dtype):
    for path in checkpoints(name, dtype).iterdir():
        config, weights = read(path)
        architecture, expected = LAYOUTS[path.name]
        reduced = path.name == "eagle3" and name != "walk-perfect"
        assert config["architectures"] == [architecture]
        assert set(weights) == expected | ({"d2t", "t2d"} if reduced else set())
        assert {tensor.dtype for name, tensor in weights.items() if name not in ("d2t", "t2d")} == {DTYPES[dtype]}
        assert config["torch_dtype"] == dtype
        if path.name != "medusa":
            backbone = config.get("backbone_hidden_size", config["hidden_size"])
            assert path.name == "dflash" or backbone == config["num_attention_heads"] * config["head_dim"]
            assert config["head_dim"] >= 32


@pytest.mark.parametrize("name", ["walk", "law", "census"])
def test_shapes_of_the_drafters(checkpoints, name):
    width = read(checkpoints(name, "float32") / "target")[0]["hidden_size"]
    _, eagle = read(checkpoints(name, "float32") / "eagle")
    assert eagle["fc.weight"].shape == (width, 2 * width)
    config, eagle3 = read(checkpoints(name, "float32") / "eagle3")
    assert eagle3["fc.weight"].shape == (width, 3 * width)
    assert eagle3["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * width
    assert eagle3["lm_head.weight"].shape == (config["draft_vocab_size"], width)
    _, mtp = read(checkpoints(name, "float32") / "mtp")
    assert mtp["model.mtp_layers.0.input_proj.weight"].shape == (width, 2 * width)


@pytest.mark.parametrize("name", ["walk", "law", "census"])
def test_reduced_draft_vocabulary(checkpoints, name):
    config, weights = read(checkpoints(name, "float32") / "eagle3")
    d2t, t2d = weights["d2t"], weights["t2d"]
    ids = torch.arange(config["draft_vocab_size"]) + d2t
    assert (d2t.dtype, t2d.dtype, t2d.shape) == (torch.int64, torch.bool, (config["vocab_size"],))
    assert len(ids) < config["vocab_size"]
    assert torch.equal(ids, t2d.nonzero().flatten())
    assert d2t.unique().numel() > 1


def test_eagle3_names_its_auxiliary_layers_in_both_forms(checkpoints):
    for name in ("walk", "law", "census"):
        config, _ = read(checkpoints(name, "float32") / "eagle3")
        ids = config["eagle_aux_hidden_state_layer_ids"]
        assert len(set(ids)) == 3
        assert max(ids) < read(checkpoints(name, "float32") / "target")[0]["num_hidden_layers"]
        shifted = [layer - 1 for layer in ids]
        assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": shifted, "use_aux_hidden_state": True}


def test_mtp_layers_are_counted(checkpoints):
    for name, layers in (("mtp", 1), ("mtp3", 3)):
        directory = checkpoints("walk", "float32") / name
        config, _ = read(directory)
        assert (config["model_type"], config["num_nextn_predict_layers"]) == ("mimo", layers)
        compile((directory / "configuration_mimo.py").read_text(), "configuration_mimo.py", "exec")


def test_stored_weights_are_the_ones_that_were_built(checkpoints, families):
    for name, drafter in families("census", "bfloat16").drafters.items():
        _, weights = read(checkpoints("census", "bfloat16") / name)
        assert all(torch.equal(weights[key], tensor) for key, tensor in drafter.weights.items())


def test_tokenizer_has_one_character_per_token(checkpoints):
    for name, size in (("walk", 64), ("law", 16), ("census", 49)):
        tokenizer = Tokenizer.from_file(str(checkpoints(name, "float32") / "target" / "tokenizer.json"))
        texts = characters(size, 2)
        assert tokenizer.get_vocab_size() == size == len(set(texts))
        for token, text in enumerate(texts):
            assert tokenizer.encode(text).ids == [token]
            assert tokenizer.decode([token], skip_special_tokens=False) == text
        ids = tuple((7 * place) % size for place in range(200))
        assert tokenizer.decode(list(ids)) == text_of(ids, size, 2)


def test_json_can_be_spelled(checkpoints):
    tokenizer = Tokenizer.from_file(str(checkpoints("walk", "float32") / "target" / "tokenizer.json"))
    text = '{"a": [1, -2.5e+3, true, false, null], "b": {"c\\\\d": "x y"}}'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokenizer_needs_characters_enough():
    with pytest.raises(ValueError, match="vocab_size=200"):
        characters(200, 2)
    with pytest.raises(ValueError, match="eos_token_id=16"):
        characters(16, 16)


def test_build_lays_out_every_family(tmp_path):
    assert build(tmp_path, ["law"], "bfloat16") == (tmp_path / "law",)
    assert {path.name for path in (tmp_path / "law").iterdir()} == {"target", *family("law").drafters}
    with pytest.raises(ValueError, match="family='lore': must be one of walk"):
        build(tmp_path, ["lore"])
    with pytest.raises(ValueError, match="dtype='float8'"):
        family("law", "float8")


def test_builders_are_deterministic():
    for name in ("law", "census"):
        first, second = family(name), family(name)
        for one, other in zip(first.drafters.values(), second.drafters.values(), strict=True):
            assert all(torch.equal(one.weights[key], other.weights[key]) for key in one.weights)
