"""Requests with grammars that a target's own greedy text fits for a while and then leaves, and drafters for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from harness.contract import Completion, Request, SamplingParams, Script
from harness.known_answer import Target
from harness.known_answer.tokenizer import characters
from harness.oracles import expected_completion, masked_stream
from harness.workloads.known import known_family
from harness.workloads.vocabulary import Vocabulary

SCHEMAS = {
    "object": '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": '
    '{"type": "boolean"}, "minItems": 1, "maxItems": 2}, "c": {"enum": ["x", 1, null]}}, "required": ["b", "c"]}',
    "strings": '{"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 2, "maxItems": 3}',
    "enum": '{"enum": ["abc", "abd", 12, true]}',
    "either": '{"anyOf": [{"type": "null"}, {"type": "object", "properties": {"k": {"const": "v"}}}]}',
}


def texts_of(target: Target) -> tuple[str, ...]:
    """What each id says; nothing for the special one."""
    said = characters(target.vocab_size, target.eos_token_id)
    return tuple("" if token_id == target.eos_token_id else text for token_id, text in enumerate(said))


def grammatical(vocabulary: Vocabulary, seed: int = 0) -> tuple[Request, ...]:
    """Grammars that end inside a block, at its border, never, or nowhere; with other masks, stops and caps on top.

    `free` and `fixed` let the target say its own text for some tokens, so that drafts are accepted up to the end of the
    grammar (`free`) or to a token that it forbids (`fixed`).
    """
    prompts = [vocabulary.prompt(length, 100 * seed + 60 + i) for i, length in enumerate((4, 9, 2, 6, 1, 12, 5, 3, 7))]
    own = [vocabulary.text(vocabulary.continue_(prompt, 12)) for prompt in prompts]
    free = vocabulary.continue_(prompts[0], 12)
    asked: dict[str, dict[str, Any]] = {
        "free": {"regex": ".{7}"},
        "fixed": {"regex": f"{re.escape(own[1][:6])}[0-9]{{2}}.{{3}}x?"},
        "endless": {"regex": "(.{4}[a-f])*", "max_new_tokens": 15, "logprobs": 2},
        "words": {"regex": "(ab|cd){2}(e|f+)"},
        "dead_end": {"regex": ".{3}~b"},
        "short": {"regex": "ab", "min_new_tokens": 5},
        "late": {"regex": ".{2}[0-9]*", "min_new_tokens": 8},
        "stopped": {"regex": ".*", "stop": (own[0][3:5],)},
        "stop_id": {"regex": ".{9}", "stop_token_ids": (free[4],)},
        "masked": {"regex": ".{4}[0-9]{3}", "bad_words": ((free[1], free[2]),), "frequency_penalty": 1.5},
        "biased": {"regex": "[a-d]{3}", "logit_bias": ((vocabulary.eos_token_id, 60.0), (3, 40.0))},
        "capped": {"regex": ".{9}", "max_new_tokens": 6},
    }
    asked |= {name: {"json_schema": schema} for name, schema in SCHEMAS.items()}
    places = {"free": 0, "stopped": 0, "stop_id": 0, "masked": 0, "fixed": 1}
    return tuple(
        Request(
            request_id=name,
            prompt_token_ids=prompts[places.get(name, place % len(prompts))],
            sampling=SamplingParams(**{"max_new_tokens": 22, **fields}),
            return_hidden_states=place % 3 == 0,
        )
        for place, (name, fields) in enumerate(asked.items())
    )


@cache
def expected(request: Request, family: str) -> Completion:
    """What a greedy request must come to: the target's law, masked by the language of its grammar."""
    target = known_family(family).target
    eos = (target.eos_token_id,)
    stream = masked_stream(_law(target), request.sampling, request.prompt_token_ids, texts_of(target), eos)
    text = _text(texts_of(target))
    return expected_completion(request, stream, eos_token_ids=eos, detokenize=text, runs_dry=True)


def _law(target: Target) -> Callable[[tuple[int, ...]], Any]:
    return lambda tokens: target.logprobs(tokens).numpy()


def _text(texts: Sequence[str]) -> Callable[[tuple[int, ...]], str]:
    return lambda tokens: "".join(texts[token_id] for token_id in tokens)


@dataclass(frozen=True)
class MaskedDrafts:
    """What the target will say under the grammar, up to its end, and then `behind` again and again."""

    family: str
    requests: tuple[Request, ...]
    behind: int

    def __call__(self, request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
        request = next(request for request in self.requests if request.request_id == request_id)
        target = known_family(self.family).target
        prompt, output = request.prompt_token_ids, tokens[len(request.prompt_token_ids) :]
        eos = (target.eos_token_id,)
        stream = masked_stream(_law(target), request.sampling, prompt, texts_of(target), eos, output)
        right = tuple(islice(stream, k))
        return [*right, *[self.behind] * (k - len(right))]


@dataclass(frozen=True)
class RightThen:
    """`right` drafts that the grammar and the target agree on, then `rest` in turn: a draft that breaks the grammar or
    ends it early, and more behind it."""

    drafts: MaskedDrafts
    right: int
    rest: tuple[int, ...]

    def __call__(self, request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
        keep = min(self.right, k)
        head = self.drafts(request_id, tokens, keep)
        return [*head, *(self.rest[place % len(self.rest)] for place in range(k - keep))]


def grammar_drafters(vocabulary: Vocabulary, requests: tuple[Request, ...]) -> dict[str, Script]:
    """Scripted drafters that know the grammars: right ones, and those that tempt a verifier to leave them."""
    eos, first, last = vocabulary.eos_token_id, 0, vocabulary.vocab_size - 1
    right = MaskedDrafts(vocabulary.family, requests, eos)
    return {
        "right_then_eos": right,
        "right_then_first": MaskedDrafts(vocabulary.family, requests, first),
        "breaks_it_at_once": RightThen(right, 0, (last, first)),
        "breaks_it_inside": RightThen(right, 2, (last, *vocabulary.continue_((last,), 3))),
        "ends_it_early": RightThen(right, 1, (eos, eos, first)),
        "goes_on_without_it": RightThen(right, 3, vocabulary.continue_((last,), 7)),
    }
