"""One token for each byte, and EOS."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from harness.known_answer.tokenizer import EOS_TOKEN
from harness.trained.text import EOS


def build_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes of UTF-8 text."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    # Byte-level models write bytes without a character of their own as the characters from 256 on.
    hidden = [byte for byte in range(256) if byte not in shown]
    vocab = {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS_TOKEN, special=True, normalized=False)])
    assert tokenizer.token_to_id(EOS_TOKEN) == EOS
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    build_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
