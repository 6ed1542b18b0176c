"""LOGP: every log probability that is reported is the target's, at its own position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from harness.contract import Completion, LogprobRow, Request, Run
from harness.invariants.base import Key, Misuse, Violation, blame, invariant
from harness.invariants.rows import NO_CHANCE, plain, same_logprob
from harness.invariants.wellformed import sound_completions, wanted_keys

Law = Callable[[tuple[int, ...]], torch.Tensor]
"""Prefix token ids (at least one) -> [V] float64 natural log of the law of the next token."""

LOGP_TOLERANCE = 1e-5
"""Nats, in fp32. Probabilities closer than this are ties: they may be ranked and listed in any order."""

_fault = partial(blame, "LOGP-1")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row was delivered, and the law that holds there. `asked` is the n of the top-n. `masked`: a grammar has
    taken some of the law away."""

    key: Key
    position: int
    row: int
    token_id: int
    law: torch.Tensor
    asked: int
    masked: bool = False


@invariant(
    "LOGP-1",
    statement="raw and processed logprobs, ranks and top-n equal the closed form at every position, prompt included, "
    "whatever block the token came from",
    needs={"logprobs", "known_answer"},
)
def logp_1(run: Run, law: Law, tolerance: float = LOGP_TOLERANCE) -> list[Violation]:
    """Compare each logprob row with `law` of the tokens before it; the engine reports the raw law (`LogprobRow`). Ranks
    that it does not tell are not judged, where it claims none.

    `tolerance` is in nats; what the engine calls impossible (-inf or below `NO_CHANCE`) must be so in the law.

    Of an engine with `grammar_before_logprobs` the rows of a request with a grammar are held against the law up to one
    factor, which all that is left has in common; their ranks are not judged.
    """
    found, out = sound_completions("LOGP-1", run)
    rows: list[tuple[_Place, LogprobRow]] = []
    for request, key in wanted_keys(run):
        if key in found:
            out += _missing(request, key, found[key])
            rows += list(_places(request, key, found[key], law, run.capabilities.grammar_before_logprobs))
    for place, row in rows:
        if row.rank is None and run.capabilities.tells_ranks:
            out.append(_fault(place.key, "rank is missing", position=place.position, row=place.row, got="nothing"))
        out += _judge_masked(place, row, tolerance) if place.masked else _judge(place, row, rows, tolerance)
    return out


def _missing(request: Request, key: Key, done: Completion) -> list[Violation]:
    aborted = done.finish_reason == "abort" and not done.token_ids
    out = []
    for name, asked, due in (
        ("logprobs", request.sampling.logprobs, len(done.token_ids)),
        ("prompt_logprobs", request.sampling.prompt_logprobs, len(request.prompt_token_ids)),
    ):
        rows = getattr(done, name)
        if asked is not None and not aborted and (rows is None or len(rows) != due):
            got = "nothing" if rows is None else len(rows)
            out.append(_fault(key, f"{name} has not one row per token", expected=due, got=got))
    return out


def _places(
    request: Request, key: Key, done: Completion, law: Law, grammar_first: bool
) -> Iterator[tuple[_Place, LogprobRow]]:
    masked = grammar_first and (request.sampling.regex is not None or request.sampling.json_schema is not None)
    tokens = (*done.prompt_token_ids, *done.token_ids)
    prompt_len = len(done.prompt_token_ids)
    for start, rows, asked in (
        (0, done.prompt_logprobs or (), request.sampling.prompt_logprobs),
        (prompt_len, done.logprobs or (), request.sampling.logprobs),
    ):
        for row, entry in enumerate(rows):
            position = start + row
            if entry is not None and 0 < position < len(tokens):
                here = plain(law(tokens[:position]))
                if here.ndim != 1:
                    raise Misuse(f"law={tuple(here.shape)}: must return one log probability per token id, [V]")
                yield _Place(key, position, row, tokens[position], here, asked or 0, masked and start > 0), entry


def _judge(
    place: _Place, row: LogprobRow, rows: Sequence[tuple[_Place, LogprobRow]], tolerance: float
) -> list[Violation]:
    fault = partial(_fault, place.key, position=place.position, row=place.row)
    if row.token_id != place.token_id or not 0 <= row.token_id < place.law.shape[0]:
        message = "logprob row is about another token than the one at its position"
        return [fault(message, expected=place.token_id, got=row.token_id, origin=_origin(place, row, rows, tolerance))]
    out = []
    expected = float(place.law[row.token_id])
    if not same_logprob(row.logprob, expected, tolerance):
        origin = _origin(place, row, rows, tolerance)
        out.append(fault("wrong logprob", expected=expected, got=row.logprob, origin=origin))
    lowest = 1 + int((place.law > expected + tolerance).sum())
    highest = max(int((place.law >= expected - tolerance).sum()), lowest)
    if row.rank is not None and not lowest <= row.rank <= highest:
        right = lowest if lowest == highest else f"{lowest}..{highest} (tied)"
        out.append(fault("wrong rank", expected=right, got=row.rank))
    return out + [fault(message, expected=right, got=got) for message, right, got in _top(place, row, tolerance)]


def _judge_masked(place: _Place, row: LogprobRow, tolerance: float) -> Iterator[Violation]:
    fault = partial(_fault, place.key, position=place.position, row=place.row)
    if row.token_id != place.token_id or not 0 <= row.token_id < place.law.shape[0]:
        message = "logprob row is about another token than the one at its position"
        yield fault(message, expected=place.token_id, got=row.token_id)
        return
    gained = row.logprob - float(place.law[row.token_id])
    if not gained >= -tolerance:
        yield fault("a mask has made a token less likely", expected=float(place.law[row.token_id]), got=row.logprob)
    for slot, (token_id, logprob) in enumerate(row.top):
        left = 0 <= token_id < place.law.shape[0] and logprob > NO_CHANCE
        if left and not same_logprob(logprob, float(place.law[token_id]) + gained, tolerance):
            message = f"top-n slot {slot} (token {token_id}): a mask has changed the odds of two tokens"
            yield fault(message, expected=float(place.law[token_id]) + gained, got=logprob)


def _top(place: _Place, row: LogprobRow, tolerance: float) -> Iterator[tuple[str, object, object]]:
    law, due = place.law, min(place.asked, place.law.shape[0])
    ids = [token_id for token_id, _ in row.top]
    if len(ids) != due:
        yield "top-n has not n entries", due, len(ids)
    if len(set(ids)) != len(ids) or any(not 0 <= token_id < law.shape[0] for token_id in ids):
        yield "top-n names a token twice, or one outside the vocabulary", f"ids in [0, {law.shape[0]})", ids
        return
    best = torch.sort(law, descending=True).values
    for slot, (token_id, logprob) in enumerate(row.top):
        expected = float(law[token_id])
        if not same_logprob(logprob, expected, tolerance):
            yield f"top-n slot {slot} (token {token_id}): wrong logprob", expected, logprob
        elif not same_logprob(expected, float(best[slot]), tolerance):
            right = [int(other) for other in torch.nonzero((law - best[slot]).abs() <= tolerance).flatten()[:4]]
            yield f"top-n slot {slot}: another token belongs there", right, token_id


def _origin(place: _Place, row: LogprobRow, rows: Sequence[tuple[_Place, LogprobRow]], tolerance: float) -> str | None:
    """The nearest position, own request first, where this row would have been right."""
    fits = [
        other
        for other, _ in rows
        if other is not place
        and other.token_id == row.token_id
        and 0 <= row.token_id < other.law.shape[0]
        and same_logprob(row.logprob, float(other.law[row.token_id]), tolerance)
    ]
    if not fits:
        return None
    best = min(fits, key=lambda other: (other.key != place.key, abs(other.position - place.position)))
    who = "the same request" if best.key == place.key else f"request {best.key[0]!r}"
    return f"this row fits position {best.position} of {who}"
