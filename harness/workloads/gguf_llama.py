"""Llama weights out of a GGUF file, in Hugging Face names and layout, as float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_llama(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(fields of a Hugging Face config.json, tensors), dequantised.

    Raises ImportError when the `gguf` package is missing, ValueError for another architecture or an unknown tensor.
    """
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(file, fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, torch.Tensor] = {}
    for stored in reader.tensors:
        weight = torch.tensor(dequantize(stored.data, stored.tensor_type), dtype=torch.float32)
        part = stored.name.split(".")[-2]
        if part in heads:
            weight = _rotate_half_rows(weight, heads[part])
        tensors[_hugging_face_name(file, stored.name)] = weight
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return config, tensors


def _config(file: Path, fields: dict[str, Any]) -> dict[str, Any]:
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"{file}: general.architecture={architecture!r}: must be 'llama'")
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def _rotate_half_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[num_heads * head_dim, hidden]: llama.cpp rotates neighbouring rows (0, 1), (2, 3) of a head together, Hugging
    Face row i with row i + head_dim / 2; bring the pairs of the one into the order of the other."""
    rows, hidden = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(rows, hidden).contiguous()


def _hugging_face_name(file: Path, name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    part = part.removesuffix(".weight")
    if prefix != "blk" or part not in _IN_LAYER:
        raise ValueError(f"{file}: tensor {name!r} is none of a plain Llama's; only such files are converted")
    return f"model.layers.{layer}.{_IN_LAYER[part]}.weight"
