"""One character per token, so that stop strings, text and grammars can be tested against known ids.

Ids ascend through `CHARACTERS`, leaving out the EOS id, which is the special token `<eos>`. From 64 tokens on the
vocabulary holds every character that JSON needs.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

EOS_TOKEN = "<eos>"
CHARACTERS = (
    string.digits + string.ascii_lowercase + '{}[]":,.-+\\ ' + "_/" + string.ascii_uppercase + "!?#$%&'()*;<=>@"
)


def characters(vocab_size: int, eos_token_id: int) -> tuple[str, ...]:
    """Text of every token id. Raises ValueError when there are too few characters or EOS lies outside."""
    if not 0 <= eos_token_id < vocab_size:
        raise ValueError(f"eos_token_id={eos_token_id}: must lie in 0..{vocab_size - 1}")
    if vocab_size - 1 > len(CHARACTERS):
        raise ValueError(f"vocab_size={vocab_size}: at most {len(CHARACTERS) + 1} one-character tokens are defined")
    texts = list(CHARACTERS[: vocab_size - 1])
    texts.insert(eos_token_id, EOS_TOKEN)
    return tuple(texts)


def text_of(token_ids: tuple[int, ...], vocab_size: int, eos_token_id: int) -> str:
    """Text that an engine returns for `token_ids`, special tokens left out."""
    texts = characters(vocab_size, eos_token_id)
    return "".join(texts[token] for token in token_ids if token != eos_token_id)


def build_tokenizer(vocab_size: int, eos_token_id: int) -> Tokenizer:
    """A BPE model without merges splits text into single characters; nothing is normalised, split or joined."""
    vocab = {text: token for token, text in enumerate(characters(vocab_size, eos_token_id))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(EOS_TOKEN, special=True, normalized=False)])
    return tokenizer


def write_tokenizer(directory: Path, vocab_size: int, eos_token_id: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    build_tokenizer(vocab_size, eos_token_id).save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
