"""Checkpoints in Hugging Face form as one GGUF file, the form that llama.cpp loads.

Tensors keep their values and their dtype. What differs is packaging: names, rows of q and k (llama.cpp turns
neighbouring rows of a `llama` head together, Hugging Face row i with row i + head_dim / 2), and the draft vocabulary of
EAGLE3, which is told as target ids instead of distances. A tensor that no model of the kind has keeps its name, one of
the wrong shape its shape, and an architecture that is not known here goes by its `model_type`: it is llama.cpp that
must notice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from safetensors.torch import load_file

from harness.known_answer.base import Config, Weights

NAME = "model.gguf"
SOURCE = "draftproof.source"
"""Metadata key: of which files this one was made, as `digest` tells."""
FILES = ("config.json", "model.safetensors", "tokenizer.json")
NO_MERGE = "\u0100 \u0101"
"""A tokenizer without merges cannot be said: this one joins two bytes that no text has."""
NORMAL, CONTROL = 1, 3
"""Token types."""

_TOP = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of models as llama.cpp knows it. `paired_rows`: its rotary embedding turns neighbouring rows. `layer`
    and `top` add to the names of tensors, without their last part; `unsaid` are tensors that it has no use for."""

    name: str
    paired_rows: bool = False
    layer: Mapping[str, str] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)
    unsaid: frozenset[str] = frozenset()


KINDS = {
    "LlamaForCausalLM": Kind("llama", paired_rows=True),
    "Qwen2ForCausalLM": Kind("qwen2"),
    "Qwen3ForCausalLM": Kind("qwen3"),
    "LlamaForCausalLMEagle3": Kind(
        "eagle3", paired_rows=True, layer={"hidden_norm": "attn_norm_2"}, top={"fc": "fc"}, unsaid=frozenset({"t2d"})
    ),
    "DFlashDraftModel": Kind("dflash", top={"fc": "fc", "hidden_norm": "enc.output_norm"}),
}
"""By the first of a config's `architectures`."""


def exported(checkpoint: Path) -> Path:
    """The GGUF file of a checkpoint, beside its other files: made if it is missing, or was made of others than lie
    there now. Raises ValueError naming the file that is missing."""
    file, source = checkpoint / NAME, digest(checkpoint)
    if not file.is_file() or _source(file) != source:
        draft = file.with_name(f".{os.getpid()}-{NAME}")
        write(checkpoint, draft, source)
        draft.replace(file)
    return file


def digest(checkpoint: Path) -> str:
    """Of the files of a checkpoint. Raises ValueError naming the one that is missing."""
    parts = hashlib.sha256()
    for name in FILES:
        path = checkpoint / name
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file; a checkpoint has {', '.join(FILES)}")
        parts.update(hashlib.sha256(path.read_bytes()).digest())
    return parts.hexdigest()


def write(checkpoint: Path, file: Path, source: str = "") -> None:
    """Write a checkpoint as `file`."""
    config: Config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    kind = KINDS.get(config["architectures"][0], Kind(config["model_type"]))
    writer = GGUFWriter(file, kind.name)
    writer.add_string(SOURCE, source)
    _write_sizes(writer, config)
    _write_drafter(writer, kind, config)
    _write_tokenizer(writer, checkpoint / "tokenizer.json", config)
    for name, tensor in tensors(kind, config, load_file(checkpoint / "model.safetensors")):
        _write_tensor(writer, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(kind: Kind, config: Config, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values as the file holds them."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in weights.items():
        if name in kind.unsaid:
            continue
        stored = stored_name(kind, name)
        part = stored.split(".")[-2] if "." in stored else ""
        if kind.paired_rows and part in heads:
            tensor = paired_rows(tensor, heads[part])
        if stored == "d2t" and tensor.ndim == 1:
            tensor = tensor + torch.arange(len(tensor), dtype=tensor.dtype)
        yield stored, tensor


def stored_name(kind: Kind, name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor; one that no model of the kind has keeps its own."""
    path, _, last = name.removeprefix("model.").rpartition(".")
    top = {**_TOP, **kind.top}
    if path in top:
        return f"{top[path]}.{last}"
    layers, _, path = path.replace("midlayer.", "layers.0.", 1).partition(".")
    layer, _, path = path.partition(".")
    inside = {**_IN_LAYER, **kind.layer}.get(path) if layers == "layers" else None
    return name if inside is None else f"blk.{layer}.{inside}.{last}"


def paired_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[num_heads * head_dim, ...]: row i of a head beside row i + head_dim / 2. One that has no such rows stays."""
    rows = tensor.shape[0]
    if rows % (2 * num_heads):
        return tensor
    halves = tensor.reshape(num_heads, 2, rows // num_heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _write_sizes(writer: GGUFWriter, config: Config) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_drafter(writer: GGUFWriter, kind: Kind, config: Config) -> None:
    """What a drafter reads of its target: the residual stream that enters these layers."""
    if kind.name == "eagle3":
        writer.add_array("eagle3.target_layers", list(config["eagle_aux_hidden_state_layer_ids"]))
        writer.add_uint32("eagle3.target_hidden_size", int(config.get("target_hidden_size") or config["hidden_size"]))
    elif kind.name == "dflash":
        words: dict[str, Any] = config["dflash_config"]
        writer.add_array("dflash.target_layers", [layer + 1 for layer in words["target_layer_ids"]])
        writer.add_uint32("dflash.block_size", config["block_size"])
        writer.add_uint32("tokenizer.ggml.mask_token_id", words["mask_token_id"])


def _write_tokenizer(writer: GGUFWriter, file: Path, config: Config) -> None:
    """Byte-level BPE that joins nothing, so that ids stay ids; EOS has no text."""
    told = json.loads(file.read_text(encoding="utf-8"))
    special = {token["id"]: token["content"] for token in told["added_tokens"]}
    texts = {token: byte_letters(text) for text, token in told["model"]["vocab"].items()} | special
    ids = range(max(texts) + 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([texts.get(token, f"[unused{token}]") for token in ids])
    writer.add_token_types([CONTROL if token in special else NORMAL for token in ids])
    writer.add_token_merges([NO_MERGE])
    writer.add_bos_token_id(config["eos_token_id"])  # unasked it takes one of its own
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def byte_letters(text: str) -> str:
    """Text as byte-level tokenizers spell it: a letter per byte, and printable ones for those that are not."""
    return "".join(_LETTERS[byte] for byte in text.encode())


def _letters() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_LETTERS = _letters()


def _write_tensor(writer: GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16 and tensor.ndim > 1:
        data = tensor.view(torch.uint8).numpy()
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.BF16)
    elif tensor.dtype.is_floating_point:
        writer.add_tensor(name, tensor.float().numpy())  # it computes with vectors in float32 only
    else:
        writer.add_tensor(name, tensor.to(torch.int64).numpy())


def _source(file: Path) -> str:
    """What `file` was made of; empty for one that cannot be read."""
    try:
        told = GGUFReader(file).get_field(SOURCE)
    except (ValueError, IndexError, OSError):
        return ""
    return "" if told is None else str(told.contents())
