"""The text that the tiny models learn from, and the prompts that they are measured on."""

from __future__ import annotations

from itertools import islice

from harness.trained.text import ALPHABET, EOS, KINDS, VOCAB_SIZE, documents, encode, is_held_out, prompts, window
from harness.trained.tokenizer import build_tokenizer
from suites.registration import suite

suite(seconds=0.3, stage="cpu", needs="cpu")

SEED, LENGTH = 1, 129


def test_a_window_depends_on_seed_and_index_alone() -> None:
    assert window(SEED, 7, LENGTH) == window(SEED, 7, LENGTH)
    assert window(SEED, 7, LENGTH)[:64] == window(SEED, 7, 64)
    distinct = {tuple(window(seed, index, LENGTH)) for seed in (1, 2) for index in range(50)}
    assert len(distinct) == 100


def test_windows_are_full_and_begin_with_whole_documents() -> None:
    for index in range(50):
        ids = window(SEED, index, LENGTH)
        assert len(ids) == LENGTH
        assert set(ids) <= set(ALPHABET)
        first = bytes(ids[: ids.index(EOS)] if EOS in ids else ids).decode()
        texts = documents(f"train-{SEED}-{index}", held_out=False)
        assert next(texts).startswith(first)


def test_no_held_out_document_is_trained_on() -> None:
    held_out = set(islice(documents("prompts-0", held_out=True), 400))
    trained = {text for index in range(400) for text in islice(documents(f"train-{SEED}-{index}", held_out=False), 4)}
    assert len(held_out) > 200
    assert not held_out & trained
    assert all(map(is_held_out, held_out))


def test_prompts_are_beginnings_of_held_out_documents() -> None:
    texts = [encode(text) for text in islice(documents("prompts-0", held_out=True), 100)]
    for ids in prompts(40):
        assert 16 <= len(ids) <= 40
        assert any(text[: len(ids)] == ids and len(text) > len(ids) for text in texts)


def test_every_kind_of_text_comes_up() -> None:
    seen = list(islice(documents("kinds", held_out=False), 200))
    marks = ("story of the", '"email"', " + ", "def ", ", 1")
    assert len(marks) == len(KINDS)
    for mark in marks:
        assert any(mark in text for text in seen), mark


def test_a_token_is_a_byte() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    text = "".join(map(chr, (*range(0xD800), 0x1F600, 0x5FFFF, 0xDFFFF, 0x10FFFF)))  # every byte that UTF-8 has
    assert tuple(tokenizer.encode(text).ids) == encode(text)
    assert tokenizer.decode(list(encode(text))) == text
    assert tokenizer.decode([*encode("end"), EOS]) == "end"
    assert [tokenizer.encode(chr(byte)).ids for byte in range(128)] == [[byte] for byte in range(128)]
