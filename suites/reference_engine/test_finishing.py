"""Finishing: every order of stop ids, stop strings, caps and minimum lengths inside a block, against the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from harness import contract
from harness.known_answer.tokenizer import build_tokenizer
from harness.oracles.finish import finish
from reference_engine.batch import Batch, StepResult
from reference_engine.output import Detokenizer, OutputProcessor
from reference_engine.request import RequestState, SamplingParams, Status
from suites.registration import suite

suite(seconds=0.8, stage="cpu", needs="cpu")

VOCAB, EOS = 16, 2


class OneTokenizer(Detokenizer):
    """Without a checkpoint."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer


CHARACTERS = OneTokenizer(build_tokenizer(VOCAB, EOS))


def text_of(token_ids: tuple[int, ...]) -> str:
    return CHARACTERS.text(list(token_ids)) or ""


def running(params: SamplingParams) -> RequestState:
    request = RequestState("a", 0, (5,), params, return_hidden_states=False, seed=0, arrival=0)
    request.status = Status.RUNNING
    request.prompt_delivered = True
    return request


def step(request: RequestState, block: tuple[int, ...]) -> StepResult:
    """A verify step that accepted `block`."""
    request.pending += 1
    request.pending_emits += 1
    request.pending_tokens += len(block)
    emitted = torch.tensor([block])
    path = torch.arange(len(block))[None]
    hidden = torch.zeros(len(block), 1)
    counts = torch.tensor([len(block)])
    return StepResult(Batch("decode", [request]), emitted, counts, hidden, len(block), path, emitted[:, 1:])


def deliver(
    params: SamplingParams, stream: tuple[int, ...], widths: list[int], detokenizer: Detokenizer = CHARACTERS
) -> tuple[RequestState, list[int]]:
    """Feed a stream in blocks, as a drafter that is right `width - 1` times would; returns what was delivered."""
    processor = OutputProcessor((EOS,), detokenizer, num_steps=8)
    request = running(params)
    delivered: list[int] = []
    place = 0
    while not request.finished and place < len(stream):
        width = widths[place % len(widths)]
        for output in processor.process(step(request, stream[place : place + width])):
            delivered += output.token_ids
        place += width
    return request, delivered


@st.composite
def finishes(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Sampling fields over a small alphabet, so that stops of all kinds meet, and a stream that respects the masks."""
    token = st.integers(0, 5)
    cap = draw(st.integers(1, 12))
    fields: dict[str, Any] = {
        "max_new_tokens": cap,
        "min_new_tokens": draw(st.integers(0, cap)),
        "stop_token_ids": tuple(draw(st.lists(token, max_size=1))),
        "stop": tuple(
            text_of(tuple(t)) or "3" for t in draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=2))
        ),
        "ignore_eos": draw(st.booleans()),
    }
    masked = {*fields["stop_token_ids"], EOS}
    early = st.sampled_from(sorted(set(range(6)) - masked))
    stream = [draw(early if place < fields["min_new_tokens"] else token) for place in range(cap)]
    return fields, tuple(stream)


@settings(max_examples=150)
@given(drawn=finishes(), widths=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_every_finish_is_that_of_the_oracle(drawn: tuple[dict[str, Any], tuple[int, ...]], widths: list[int]) -> None:
    fields, stream = drawn
    right = finish(stream, contract.SamplingParams(**fields), eos_token_ids=(EOS,), detokenize=text_of)
    request, delivered = deliver(SamplingParams(**fields), stream, widths)
    assert (tuple(delivered), request.finish_reason, request.text) == (right.token_ids, right.reason, right.text)
    assert tuple(request.output_token_ids) == right.token_ids
    assert (request.pending, request.pending_emits, request.pending_tokens) == (0, 0, 0)


def test_a_stop_string_before_the_minimum_does_not_cut_later() -> None:
    """The text is cut at the string that stopped the request, not at an older one that did not count."""
    params = SamplingParams(stop=("4", "5"), min_new_tokens=3, max_new_tokens=9)
    request, delivered = deliver(params, ids("4333353"), [4])
    assert (request.finish_reason, request.text, len(delivered)) == ("stop", "43333", 6)


def test_a_stop_string_across_tokens_without_text() -> None:
    """Special tokens add nothing to the text, however many stand between the parts of a stop string."""
    params = SamplingParams(stop=("34",), ignore_eos=True, max_new_tokens=60)
    request, delivered = deliver(params, (*ids("53"), *[EOS] * 30, *ids("45")), [4])
    assert (request.finish_reason, request.text, len(delivered)) == ("stop", "5", 33)


def ids(text: str) -> tuple[int, ...]:
    return tuple(CHARACTERS.tokenizer.encode(text).ids) if CHARACTERS.tokenizer is not None else ()


@pytest.fixture(scope="module")
def byte_level() -> Detokenizer:
    """One token per byte, as the rarest characters of a byte-level BPE are spelled."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return OneTokenizer(tokenizer)


@pytest.mark.parametrize("widths", [[1], [3], [7]])
@pytest.mark.parametrize(("stop", "text"), [("é", "cr"), ("ème", "cr"), ("\U0001f36e", "crème, brûlée ")])
def test_stop_strings_in_characters_of_several_tokens(
    byte_level: Detokenizer, stop: str, text: str, widths: list[int]
) -> None:
    """Until its last byte is there, a character decodes to a replacement character."""
    assert byte_level.tokenizer is not None
    whole = {"é": "créme", "ème": "crème brûlée", "\U0001f36e": "crème, brûlée \U0001f36e!"}[stop]
    stream = tuple(byte_level.tokenizer.encode(whole).ids)
    params = SamplingParams(stop=(stop,), max_new_tokens=99, ignore_eos=True)
    request, delivered = deliver(params, stream, widths, byte_level)
    assert (request.finish_reason, request.text) == ("stop", text)
    assert byte_level.text(delivered) == text + stop


def test_without_a_tokenizer_there_is_no_text(tmp_path: Path) -> None:
    assert Detokenizer(tmp_path).text([1, 2]) is None


def ends_first(token_ids: list[int], stop: tuple[str, ...]) -> int:
    """Where the earliest stop string starts that the last token completed, by the whole texts; -1 without any."""
    before, after = text_of(tuple(token_ids[:-1])), text_of(tuple(token_ids))
    found = [(start, s) for s in stop for start in range(len(after)) if after.startswith(s, start)]
    return min((start for start, s in found if start + len(s) > len(before)), default=-1)


SILENT = (EOS,) * 12
"""Special tokens add no text."""


@pytest.mark.parametrize(
    ("token_ids", "stop"),
    [
        ((3, 4, 5, 6, 7), (text_of((6, 7)), text_of((4, 5, 6, 7)))),
        ((3, 4, 5, 6, 7), (text_of((7,)), text_of((3, 4, 5, 6, 7)))),
        ((*range(3, 16), 3, 4, 5), (text_of((5,)), text_of((*range(3, 16), 3, 4, 5)))),
        ((3, 4, *SILENT, *SILENT, 5), (text_of((3, 4, 5)),)),
        ((3, *SILENT, 4, *SILENT, 5), (text_of((3, 4, 5)), text_of((4, 5)))),
        ((3, 4, *[9] * 40, 5), (text_of((3, 4)), text_of((4, 5)))),
        ((3, 4, *[9] * 40, 3, 4), (text_of((3, 4)),)),
        ((*[9] * 20, 3, 4, *[9] * 20, 3, 4), (text_of((3, 4)),)),
        ((3,), (text_of((3,)),)),
        ((3, 4), (text_of((5,)),)),
    ],
)
def test_where_a_stop_string_begins(token_ids: tuple[int, ...], stop: tuple[str, ...]) -> None:
    """However long the text is, whatever came before, and however little text its tokens have."""
    assert CHARACTERS.stop_position(list(token_ids), stop) == ends_first(list(token_ids), stop)


def test_a_stop_string_that_reaches_into_a_long_token() -> None:
    """The window in which it is looked for must hold what comes before the last token, not the last token alone."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "bcd": 1, "": 2}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    assert OneTokenizer(tokenizer).stop_position([0, 0, *[2] * 12, 1], ("aab",)) == 0


@settings(max_examples=200)
@given(
    token_ids=st.lists(st.sampled_from((EOS, 3, 4)), min_size=1, max_size=60),
    stop=st.lists(st.text(text_of((3, 4)), min_size=1, max_size=6), min_size=1, max_size=3).map(tuple),
)
def test_stop_strings_anywhere(token_ids: list[int], stop: tuple[str, ...]) -> None:
    assert CHARACTERS.stop_position(token_ids, stop) == ends_first(token_ids, stop)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_nothing_is_counted_before_anything_was_drafted(num_steps: int) -> None:
    assert OutputProcessor((EOS,), CHARACTERS, num_steps).stats.accepted_per_position == [0] * num_steps
