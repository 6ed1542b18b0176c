"""The language of a grammar against Python's own `re` and `json`, text by text, and what a target says under it."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest

from harness.contract import SamplingParams, json_expression, reading_of, regex_expression
from harness.oracles import canonical_grammar, following_ids, masked_stream
from suites.registration import suite

suite(seconds=0.5, stage="cpu", needs="cpu")

PATTERNS = (
    "a*b*",
    "(ab|b)+a?",
    "(a|b*)*c",
    "a{2,3}|b?",
    "a{2}b{0,1}c{1,}",
    "[^ab]c",
    "[a-b.]{2}",
    "(a*)*",
    "(a?){3}b",
    r"\.\d?a",
    r"[\d\-]+",
    "(?:a|ab)(?:c|bc)",
    "",
    "a|",
    ".b",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regexes_against_re(pattern: str) -> None:
    """All texts of up to five of these characters: whole ones, and (of up to two) what begins one."""
    alphabet = "abc.1-"
    whole = {"".join(t) for n in range(6) for t in itertools.product(alphabet, repeat=n)}
    start = reading_of(regex_expression(pattern))
    matched = {text for text in whole if re.fullmatch(pattern, text)}
    begun = {text[:cut] for text in matched for cut in range(len(text) + 1)}
    for text in (text for text in whole if len(text) < 5):
        reading = start.after(text)
        assert reading.complete == (text in matched), text
        assert reading.alive or text not in begun, text
        if reading.alive and len(text) < 3:
            assert text in begun, text


@pytest.mark.parametrize("pattern", ["(?=a)b", "[a", "a)", "(a", "*a", "a{x}", r"\ba", "^a", "a\\", r"[\D]"])
def test_what_it_does_not_know_it_names(pattern: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(pattern))):
        regex_expression(pattern)


VALUES: tuple[Any, ...] = (
    *(0, -7, 3.5, 1e3, "", "ab", 'q"\\', None, True, False, [], [1], [1, 2, 3], ["ab", "c"], {}),
    *(
        {"a": 1},
        {"a": 1, "b": "x"},
        {"b": "x", "a": -2},
        {"a": "x"},
        {"b": "x"},
        {"a": 1, "z": [{}]},
        {"a": {"a": [None]}},
    ),
)
SCHEMAS: dict[str, Any] = {
    "{}": lambda _: True,
    '{"type": "integer"}': lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v == int(v),
    '{"type": "number"}': lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    '{"type": ["null", "boolean"]}': lambda v: v is None or isinstance(v, bool),
    '{"type": "string", "minLength": 1, "maxLength": 3}': lambda v: isinstance(v, str) and 1 <= len(v) <= 3,
    '{"enum": ["ab", 0, null]}': lambda v: any(
        v is one or (v == one and type(v) is type(one)) for one in ("ab", 0, None)
    ),
    '{"const": true}': lambda v: v is True,
    '{"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}': lambda v: v == [1],
    '{"type": "array"}': lambda v: isinstance(v, list),
    '{"type": "object"}': lambda v: isinstance(v, dict),
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}': (
        lambda v: isinstance(v, dict) and isinstance(v.get("a"), int) and isinstance(v.get("b", ""), str)
    ),
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}': (
        lambda v: v in ({}, {"a": 1})
    ),
    '{"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}': lambda v: v is None or v == [],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_json_against_json(schema: str) -> None:
    """Values as Python writes them, with any space; every beginning of a right one is alive."""
    start = reading_of(json_expression(schema))
    for value in VALUES:
        for text in (json.dumps(value), json.dumps(value, separators=(",", ":")), f" {json.dumps(value, indent=1)}\n"):
            reading = start.after(text)
            assert reading.complete == SCHEMAS[schema](value), text
            if reading.complete:
                assert all(start.after(text[:cut]).alive for cut in range(len(text)))
    for junk in ("[1", "1]", "{'a': 1}", "tru", "01", "+1", "1.", '"\n"', '{"a" 1}', "[1,]", "nul l", ""):
        with pytest.raises(json.JSONDecodeError):
            json.loads(junk)
        assert not start.after(junk).complete, junk


def test_canonical_json_is_narrower() -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "required": ["b"]}'
    wide, narrow = (reading_of(json_expression(schema, canonical=canonical)) for canonical in (False, True))
    for text, kept in (
        ('{"a":1,"b":null}', True),
        ('{ "b" : null }', True),
        ('{"b":null,"a":1}', False),
        ('{"b":null,"c":1}', False),
        (' {"b":null}', False),
        ('{"a":-0,"b":null}', False),
        ('{"a":1.0,"b":null}', False),
    ):
        assert wide.after(text).complete
        assert narrow.after(text).complete == kept, text


def test_unknown_keywords_are_named() -> None:
    for schema, name in (
        ('{"pattern": "a"}', "pattern"),
        ('{"type": "date"}', "date"),
        ("{", "no JSON"),
        ("[1]", "object"),
    ):
        with pytest.raises(ValueError, match=name):
            json_expression(schema)


TEXTS = ("a", "b", "", "ab", "c")
EOS = (2,)


def test_ids_that_may_follow() -> None:
    """Tokens of several characters count whole; EOS comes where the text may end; special tokens say nothing."""
    grammar = canonical_grammar(SamplingParams(regex="a+b?"))
    assert grammar is not None
    assert following_ids(grammar, TEXTS, EOS) == {0, 3}
    assert following_ids(grammar.after("a"), TEXTS, EOS) == {0, 1, 2, 3}
    assert following_ids(grammar.after("ab"), TEXTS, EOS) == {2}
    assert following_ids(grammar.after("c"), TEXTS, EOS) == frozenset()
    assert canonical_grammar(SamplingParams()) is None


def test_a_masked_stream_by_hand() -> None:
    """The law prefers c, then b, then a, whatever came before."""
    law = np.array([-3.0, -2.0, -9.0, -4.0, -1.0])

    def stream(output: tuple[int, ...] = (), **fields: Any) -> tuple[int, ...]:
        return tuple(masked_stream(lambda _: law, SamplingParams(**fields), (4,), TEXTS, EOS, output))

    assert stream(max_new_tokens=3) == (4, 4, 4)
    assert stream(regex="ab?c{2}") == (0, 4, 4, 2)
    assert stream(regex="ab?c{2}", max_new_tokens=2) == (0, 4)
    assert stream(regex="ab?c{2}", output=(0, 1)) == (4, 4, 2)
    assert stream(regex="abc", bad_words=((4,),)) == (0, 1)
    assert stream(regex="[ab]{2}", bad_words=((1, 1),)) == (1, 0, 2)
    assert stream(allowed_token_ids=(0, 3), max_new_tokens=2) == (0, 0)
    assert stream(regex="a", min_new_tokens=2) == (0,)
