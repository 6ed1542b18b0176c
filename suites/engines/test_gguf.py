"""GGUF files of known-answer checkpoints, read back: the same numbers under llama.cpp's names, ids that stay ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file, save_file

from harness.known_answer import family
from harness.known_answer.gguf import KINDS, Kind, byte_letters, exported, paired_rows, stored_name, tensors
from harness.known_answer.tokenizer import EOS_TOKEN, characters
from harness.workloads.gguf_llama import read_llama
from suites.registration import suite

suite(seconds=3, stage="cpu", needs="cpu")

Checkpoint = Callable[..., Path]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    def written(name: str, dtype: str = "float32", family_name: str = "law") -> Path:
        built = family(family_name, dtype)
        (built.target if name == "target" else built.drafters[name]).write(tmp_path / name)
        return tmp_path / name

    return written


def read(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata and tensors of a file, as they lie in it."""
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    found = {}
    for one in reader.tensors:
        data = one.data if one.data.dtype.kind == "i" else dequantize(one.data, one.tensor_type)
        found[one.name] = torch.tensor(data)
    return fields, found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["target", "standalone"])
def test_a_llama_read_back_is_the_checkpoint(checkpoint: Checkpoint, name: str, dtype: str) -> None:
    folder = checkpoint(name, dtype, "census")
    config, weights = read_llama(exported(folder))
    told, right = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert set(weights) == set(right)
    for key, tensor in right.items():
        assert torch.equal(weights[key], tensor.float()), key
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "eos_token_id"):
        assert config[key] == told[key], key
    assert config["rms_norm_eps"] == pytest.approx(told["rms_norm_eps"])
    assert config["rope_theta"] == told["rope_theta"]


def test_rows_that_turn_together_lie_together() -> None:
    """Two heads of four rows: i and i + 2 become neighbours."""
    rows = torch.arange(8)[:, None] * torch.ones(3)
    assert paired_rows(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_rows_that_make_no_heads_stay_as_they_are() -> None:
    rows = torch.rand(7, 3)
    assert torch.equal(paired_rows(rows, 2), rows)


def test_ids_stay_ids_and_every_piece_is_its_bytes(checkpoint: Checkpoint) -> None:
    fields, _ = read(exported(checkpoint("target", family_name="walk")))
    texts = characters(64, 2)
    assert fields["tokenizer.ggml.tokens"] == [EOS_TOKEN if i == 2 else byte_letters(t) for i, t in enumerate(texts)]
    assert fields["tokenizer.ggml.token_type"] == [3 if i == 2 else 1 for i in range(64)]
    assert fields["tokenizer.ggml.eos_token_id"] == 2
    assert fields["tokenizer.ggml.add_bos_token"] is False


def test_a_space_and_a_letter_beyond_ascii_as_byte_level_tokenizers_spell_them() -> None:
    assert (byte_letters("a b"), byte_letters("é"), byte_letters("\n")) == ("aĠb", "Ã©", "Ċ")


def test_eagle3_names_target_ids_and_the_layers_that_it_reads(checkpoint: Checkpoint) -> None:
    folder = checkpoint("eagle3")
    fields, found = read(exported(folder))
    weights = load_file(folder / "model.safetensors")
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.target_layers"] == [1, 2, 3]
    distances = weights["d2t"]
    assert found["d2t"].tolist() == (distances + torch.arange(len(distances))).tolist()
    assert torch.equal(found["fc.weight"], weights["fc.weight"])
    assert torch.equal(found["blk.0.attn_norm_2.weight"], weights["midlayer.hidden_norm.weight"])
    assert "t2d" not in found
    assert len(found) == len(weights) - 1


def test_dflash_reads_what_leaves_its_layers(checkpoint: Checkpoint) -> None:
    folder = checkpoint("dflash")
    fields, found = read(exported(folder))
    weights = load_file(folder / "model.safetensors")
    assert fields["general.architecture"] == "dflash"
    assert fields["dflash.target_layers"] == [1, 2, 3]  # the layers whose output is read are 0, 1, 2
    assert (fields["dflash.block_size"], fields["tokenizer.ggml.mask_token_id"]) == (9, 2)
    assert torch.equal(found["enc.output_norm.weight"], weights["hidden_norm.weight"])
    assert torch.equal(found["blk.1.attn_q.weight"], weights["layers.1.self_attn.q_proj.weight"])  # not paired
    assert len(found) == len(weights)


def test_faults_go_into_the_file_for_llama_cpp_to_see() -> None:
    """A tensor under another name, and one of another shape."""
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    odd = torch.rand(7, 3)
    weights = {"model.layers.0.self_attn.q_proj.weight.old": odd, "model.layers.0.self_attn.k_proj.weight": odd}
    told = dict(tensors(KINDS["LlamaForCausalLM"], config, weights))
    assert list(told) == ["model.layers.0.self_attn.q_proj.weight.old", "blk.0.attn_k.weight"]
    assert torch.equal(told["blk.0.attn_k.weight"], odd)


def test_an_unknown_architecture_goes_by_its_model_type(checkpoint: Checkpoint) -> None:
    folder = checkpoint("target")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}
    (folder / "config.json").write_text(json.dumps(config))
    assert read(exported(folder))[0]["general.architecture"] == "nobody"


def test_a_checkpoint_that_changed_is_exported_again(checkpoint: Checkpoint) -> None:
    folder = checkpoint("target")
    file = exported(folder)
    made = file.stat().st_mtime_ns
    assert exported(folder).stat().st_mtime_ns == made
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] += 1.0
    save_file(weights, folder / "model.safetensors")
    assert torch.equal(read(exported(folder))[1]["output.weight"], weights["lm_head.weight"])


def test_a_broken_file_is_made_again(checkpoint: Checkpoint) -> None:
    folder = checkpoint("target")
    whole = exported(folder).read_bytes()
    exported(folder).write_bytes(whole[:100])
    assert exported(folder).read_bytes() == whole


def test_a_missing_file_is_named(checkpoint: Checkpoint) -> None:
    folder = checkpoint("target")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        exported(folder)


def test_names_of_a_qwen3() -> None:
    name = "model.layers.3.self_attn.q_norm.weight"
    assert stored_name(Kind("qwen3"), name) == "blk.3.attn_q_norm.weight"


def test_layers_of_another_kind_are_no_layers(checkpoint: Checkpoint) -> None:
    """MiMo has an MTP layer beside the others. llama.cpp knows no MiMo: the file says what it is."""
    name = "model.mtp_layers.0.input_layernorm.weight"
    assert stored_name(Kind("mimo"), name) == name
    fields, found = read(exported(checkpoint("mtp")))
    assert fields["general.architecture"] == "mimo"
    assert {"blk.0.attn_norm.weight", name} <= set(found)
