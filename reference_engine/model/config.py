"""A checkpoint's config.json, read strictly: what is not understood is refused, never ignored.

`DraftproofHybridForCausalLM` is ours, for known answers about recurrent state: MiMo (Qwen2, its tensor names, and MTP
layers where there are any) with gated linear attention beside the attention of some layers. Those are listed in
`recurrent_layers`; the sizes of a state are `recurrent_num_heads`, `recurrent_key_dim` and `recurrent_value_dim`. Such
a layer has, below `model.layers.I.recurrent`, `q_proj`, `k_proj` [heads * key_dim, hidden], `v_proj` [heads *
value_dim, hidden], `g_proj` [heads, hidden], all `.weight`, `g_proj.bias` [heads], `o_proj.weight` [hidden, heads *
value_dim]. `reference_engine.model.recurrent` says what is computed.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HYBRID = "DraftproofHybridForCausalLM"
TARGETS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MiMoForCausalLM", HYBRID)
DRAFTERS = (
    "LlamaForCausalLMEagle",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "EagleLlamaForCausalLM",
    "LlamaForCausalLMFrozenKVMTP",
    "DFlashDraftModel",
)
HEADS = ("MedusaModel",)
"""Drafters that are no language models: their configuration has other keys, which the drafter itself reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a Llama-family model. `head_dim` may differ from hidden_size / num_heads.

    `aux_layer_ids`: for EAGLE3, i = the residual stream entering layer i of the target (num_layers = leaving the last).
    """

    path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]
    max_positions: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    num_mtp_layers: int = 0
    draft_vocab_size: int = 0
    aux_layer_ids: tuple[int, ...] = ()
    target_hidden_size: int = 0
    recurrent_layers: tuple[int, ...] = ()
    recurrent_state_size: tuple[int, int, int] = (0, 0, 0)
    """Heads, key_dim and value_dim of the state of one layer."""

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Read `path`/config.json. Raises ValueError naming the key, the value and what is supported."""
        return _Reader(path, read_raw(path)).read()


def read_raw(path: Path) -> dict[str, Any]:
    """`path`/config.json as it is. Raises ValueError when there is none."""
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"model={str(path)!r}: no config.json there; give the folder of a Hugging Face checkpoint")
    return read_object(file)


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError that names the file when it holds none."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is no JSON ({error}); it is damaged, copy it again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: holds a {type(raw).__name__}, must be an object with the keys of a configuration")
    return raw


def integers(value: object, least: int, below: int) -> bool:
    """Whether it is a list of integers from `least` on, all below `below`."""
    return isinstance(value, list) and all(type(one) is int and least <= one < below for one in value)


class _Reader:
    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def fail(self, key: str, right: str) -> ValueError:
        return ValueError(f"{self.path / 'config.json'}: {key}={self.raw.get(key)!r}: {right}")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise self.fail(key, "must be a positive integer")
        return value

    def count(self, key: str) -> int:
        """0 where it is left out."""
        value = self.raw.get(key) or 0
        if type(value) is not int or value < 0:
            raise self.fail(key, "must be an integer from 0 on")
        return value

    def positive(self, key: str, value: object) -> float:
        if type(value) not in (int, float) or not 0 < float(str(value)) < math.inf:
            raise self.fail(key, "must be a positive number")
        return float(str(value))

    def part(self, key: str) -> dict[str, Any]:
        """An object within the configuration; empty where it is left out."""
        value = self.raw.get(key) or {}
        if not isinstance(value, dict):
            raise self.fail(key, "must be an object, or left out")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "must be true or false")
        return value

    def eos(self, vocab_size: int) -> tuple[int, ...]:
        value = self.raw.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not integers(ids, 0, vocab_size):
            raise self.fail("eos_token_id", f"must be ids in 0..{vocab_size - 1}, the vocabulary, or left out")
        return tuple(ids)

    def aux(self) -> tuple[int, ...]:
        """Layers whose input EAGLE3 reads. SGLang counts from the output of a layer, we (as vLLM) from the input of the
        next one."""
        key = "eagle_aux_hidden_state_layer_ids"
        own, others = self.raw.get(key), self.part("eagle_config").get(key)
        ids, shift = (own, 0) if own is not None else (others or [], 1)
        if not integers(ids, -shift, sys.maxsize):
            raise ValueError(f"{self.path / 'config.json'}: {key}={ids!r}: must list layers of the target")
        return tuple(layer + shift for layer in ids)

    def read(self) -> ModelConfig:
        raw = self.raw
        names = raw.get("architectures") or ["(none)"]
        if not isinstance(names, list):
            raise self.fail("architectures", "must be a list with one name")
        architecture = names[0]
        if architecture in HEADS:
            raise self.fail("architectures", "is a set of draft heads, not a model")
        if architecture not in TARGETS + DRAFTERS:
            raise self.fail("architectures", f"supported are {', '.join(TARGETS + DRAFTERS)}")
        if raw.get("hidden_act", "silu") != "silu":
            raise self.fail("hidden_act", "only 'silu' is supported")
        if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
            raise self.fail("use_sliding_window", "sliding-window attention is not supported; must be false")
        if raw.get("quantization_config"):
            raise self.fail("quantization_config", "quantised checkpoints are not supported")
        heads = self.size("num_attention_heads")
        hidden = self.size("hidden_size")
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.fail("num_key_value_heads", f"must divide num_attention_heads ({heads})")
        head_dim = self.size("head_dim") if raw.get("head_dim") is not None else hidden // heads
        if head_dim % 2:
            raise self.fail("head_dim", "must be even for rotary embeddings")
        qwen2 = architecture in ("Qwen2ForCausalLM", "MiMoForCausalLM", HYBRID)
        attention_bias = self.flag("attention_bias", qwen2)
        theta, scaling = self.rope()
        vocab_size = self.size("vocab_size")
        has_mtp = architecture in ("MiMoForCausalLM", HYBRID)
        return ModelConfig(
            path=self.path,
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=self.size("intermediate_size"),
            num_layers=self.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=self.size("max_position_embeddings", 2048),
            qkv_bias=attention_bias,
            o_bias=attention_bias and not qwen2,
            mlp_bias=self.flag("mlp_bias"),
            qk_norm=architecture in ("Qwen3ForCausalLM", "DFlashDraftModel"),
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            eos_token_ids=self.eos(vocab_size),
            num_mtp_layers=self.count("num_nextn_predict_layers") if has_mtp else 0,
            draft_vocab_size=self.count("draft_vocab_size"),
            aux_layer_ids=self.aux(),
            target_hidden_size=self.count("target_hidden_size") or hidden,
            **(self.recurrent() if architecture == HYBRID else {}),
        )

    def recurrent(self) -> dict[str, Any]:
        layers, last = self.raw.get("recurrent_layers"), self.size("num_hidden_layers") - 1
        if not isinstance(layers, list) or not layers or any(layer not in range(last + 1) for layer in layers):
            raise self.fail("recurrent_layers", f"must list layers in 0..{last}")
        sizes = [self.size(f"recurrent_{name}") for name in ("num_heads", "key_dim", "value_dim")]
        return {"recurrent_layers": tuple(layers), "recurrent_state_size": tuple(sizes)}

    def rope(self) -> tuple[float, dict[str, Any]]:
        """Rotary base and scaling, in the old form (rope_theta, rope_scaling) or the new one (rope_parameters)."""
        parameters = self.part("rope_parameters")
        scaling = self.part("rope_scaling") or parameters
        where = "rope_parameters" if "rope_theta" in parameters else "rope_theta"
        theta = self.positive(where, parameters.get("rope_theta", self.raw.get("rope_theta", 10000.0)))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            key = "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
            raise self.fail(key, "supported rotary types are default, linear, llama3")
        return theta, {**scaling, "rope_type": kind}
