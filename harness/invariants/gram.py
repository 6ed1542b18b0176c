"""GRAM: what a request with a grammar says is the beginning of a text of that grammar, and ends where one ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from harness.contract import (
    Completion,
    Reading,
    Request,
    Run,
    SamplingParams,
    json_expression,
    reading_of,
    regex_expression,
)
from harness.invariants.base import Key, Misuse, Violation, blame, invariant
from harness.invariants.checkpoint import eos_token_ids as stored_eos
from harness.invariants.trace import VerifyRow, counted_rows, verify_rows
from harness.invariants.wellformed import sound_completions, wanted_keys

Detokenize = Callable[[tuple[int, ...]], str]

_fault = partial(blame, "GRAM-1")


def grammar_of(sampling: SamplingParams) -> Reading | None:
    """The texts that a request may come to, before the first character; None when it may say anything."""
    try:
        if sampling.regex is not None:
            return reading_of(regex_expression(sampling.regex))
        if sampling.json_schema is not None:
            return reading_of(json_expression(sampling.json_schema))
    except ValueError as error:
        raise Misuse(f"GRAM-1 cannot judge this grammar: {error}") from error
    return None


@invariant(
    "GRAM-1",
    statement="every emitted prefix is accepted by the grammar; draft tokens after a terminated or violated grammar "
    "are never committed",
    needs={"completion", "grammar"},
)
def gram_1(
    run: Run, detokenize: Detokenize | None = None, eos_token_ids: Collection[int] | None = None
) -> list[Violation]:
    """Text and grammar are enough. With `detokenize` (which leaves EOS out) the token ids must spell the same, and with
    verify traces too no block may hold a token that the grammar forbids where it stands, even where a finish cut it."""
    eos = stored_eos(run) if eos_token_ids is None else frozenset(eos_token_ids)
    found, out = sound_completions("GRAM-1", run)
    rows, flaws = verify_rows("GRAM-1", run)
    out += flaws
    counted = counted_rows(rows)
    constrained = [(request, key, grammar_of(request.sampling)) for request, key in wanted_keys(run)]
    for request, key, grammar in constrained:
        if grammar is not None and key in found:
            done = found[key]
            other = request.sampling.stop_token_ids if run.capabilities.stop_ids_end_grammars else ()
            ends = eos | set(other)
            out += _text(request, key, done, grammar, ends, detokenize)
            out += _end(request, key, done, grammar, ends, detokenize)
            if detokenize is not None:
                out += _blocks(request, key, done, grammar, counted.get(key, []), ends, detokenize)
    return out


def _spelled(done: Completion, eos: frozenset[int], detokenize: Detokenize) -> str:
    """The whole output in characters: what stop strings cut off the text is part of it."""
    return detokenize(tuple(token for token in done.token_ids if token not in eos))


def _text(
    request: Request, key: Key, done: Completion, grammar: Reading, eos: frozenset[int], detokenize: Detokenize | None
) -> list[Violation]:
    texts = {"text": done.text} if done.text is not None else {}
    if detokenize is not None:
        texts["text of the token ids"] = _spelled(done, eos, detokenize)
    if not texts:
        return [_fault(key, "nothing to judge: the completion has no text, and no detokenizer was given")]
    for name, text in texts.items():
        reading = grammar
        for place, char in enumerate(text):
            if not reading.lets(char):
                message = (
                    f"the {name} leaves the grammar at character {place}, after {text[max(place - 20, 0) : place]!r}"
                )
                row = None if detokenize is None else _row_of(done, place, detokenize)
                position = None if row is None else len(request.prompt_token_ids) + row
                return [_fault(key, message, row=row, position=position, expected=reading.choices, got=char)]
            reading = reading.after(char)
    return []


def _row_of(done: Completion, place: int, detokenize: Detokenize) -> int:
    """The output token that brought the character at `place`."""
    lengths = (len(detokenize(tuple(done.token_ids[: row + 1]))) for row in range(len(done.token_ids)))
    return next((row for row, length in enumerate(lengths) if length > place), len(done.token_ids) - 1)


def _end(
    request: Request, key: Key, done: Completion, grammar: Reading, eos: frozenset[int], detokenize: Detokenize | None
) -> list[Violation]:
    """An EOS comes where the grammar is complete; a request that could end there is not aborted."""
    text = done.text if detokenize is None else _spelled(done, eos, detokenize)
    reading = grammar.after(text or "")
    if not reading.alive:
        return []  # told by `_text`
    sampling, tokens = request.sampling, done.token_ids
    at_eos = bool(tokens) and tokens[-1] in eos
    other_stop = bool(sampling.stop or sampling.stop_token_ids) and not at_eos
    row = len(tokens) - 1
    if done.finish_reason == "stop" and not other_stop and not reading.complete:
        message = "the output ends before the grammar does"
        return [_fault(key, message, row=row, expected=reading.choices, got="the end")]
    early = len(tokens) < sampling.min_new_tokens or bool(sampling.allowed_token_ids or sampling.logit_bias)
    early = early or any(word[-1] in eos for word in sampling.bad_words)
    if done.finish_reason == "abort" and request.abort_step is None and reading.complete and not early:
        message = "the request was aborted where its grammar is complete, though nobody aborted it"
        return [_fault(key, message, row=row, expected=f"end of sequence, {sorted(eos)}", got="abort")]
    return []


def _blocks(
    request: Request,
    key: Key,
    done: Completion,
    grammar: Reading,
    rows: Sequence[VerifyRow],
    eos: frozenset[int],
    detokenize: Detokenize,
) -> list[Violation]:
    """Every block, before any finish cut it: the prefill gives the first token, verify steps give the others."""
    tokens = tuple(done.token_ids[:1])
    reading = grammar.after(detokenize(tokens)) if not eos.intersection(tokens) else grammar
    for place, row in enumerate(rows):
        block = row.block
        if done.finish_reason == "abort" and request.abort_step is None and place == len(rows) - 1:
            block = block[:-1]  # where nothing was left to choose, the last id stands for nothing
        for depth, token in enumerate(block):
            position = len(request.prompt_token_ids) + len(tokens)
            fault = partial(_fault, key, step=row.step, row=row.row, position=position, got=token)
            if eos.intersection(tokens[-1:]):
                behind = "a draft was accepted behind the end of the grammar"
                return [fault(behind, expected="no draft")] if depth < row.accept_len - 1 else []
            if token in eos:
                if not reading.complete:
                    return [fault("a block ends the output before the grammar does", expected=reading.choices)]
            else:
                after = reading.after(detokenize((*tokens, token))[len(detokenize(tokens)) :])
                if not after.alive:
                    return [fault("a block holds a token that the grammar forbids there", expected=reading.choices)]
                reading = after
            tokens = (*tokens, token)
    return []
