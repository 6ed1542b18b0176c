"""Small random Llama-family checkpoints, written by transformers itself in the stock Hugging Face format.

They stand for "any real checkpoint" where a known answer is not the point: loading, parity, speed. Each carries a
tokenizer with one printable ASCII character per token, so that text and stop strings work too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

Architecture = Literal["llama", "qwen2", "qwen3"]

EOS_TOKEN_ID = 0
CHARACTERS = tuple(chr(code) for code in range(32, 127))
VOCAB_SIZE = 1 + len(CHARACTERS)

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
    # Large enough that greedy decoding wanders and its gaps lie far above float32 rounding.
    "initializer_range": 0.25,
}


def random_checkpoint(
    directory: Path, architecture: Architecture = "llama", *, seed: int, shard_bytes: int = 1 << 30, **config: Any
) -> Path:
    """Write a random float32 checkpoint into `directory` and return it; `config` overrides fields of its config.json.

    Norm weights and biases are random too (transformers starts them at one and zero, where a loader that leaves them
    out would not be seen). More than `shard_bytes` of weights are split into shards with an index.
    """
    model_config = AutoConfig.for_model(architecture, **{**_SMALL, **config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.2)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=shard_bytes)
    character_tokenizer().save_pretrained(directory)
    return directory


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Id 0 is `</s>`, ids 1..95 are the printable ASCII characters in their order."""
    vocab = {"</s>": EOS_TOKEN_ID, **{character: 1 + index for index, character in enumerate(CHARACTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")  # type: ignore[no-untyped-call]


def encode(text: str) -> tuple[int, ...]:
    """Ids of printable ASCII `text` in `character_tokenizer`. Raises ValueError on any other character."""
    return tuple(1 + CHARACTERS.index(character) for character in text)


def edit_config(directory: Path, **fields: Any) -> None:
    """Overwrite fields of a checkpoint's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
