"""Comparing two completions of one request: what EQUAL, FINISH, SCHED and ALIAS-2 have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from harness.contract import Completion, HiddenStates, LogprobRow, Request, Run
from harness.invariants.base import Key, Misuse, Violation, blame
from harness.invariants.rows import (
    LOGPROB_TOLERANCE,
    ROW_TOLERANCE,
    plain,
    row_errors,
    same_logprob,
    show_difference,
)
from harness.invariants.wellformed import sound_completions, wanted_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How two completions are compared.

    `arm` names the other run in messages. `presence` demands that optional parts are there in both or in neither;
    otherwise they are compared where both have them. `accept_lens` compares accept and draft lengths too.
    """

    arm: str
    logprob_tolerance: float
    row_tolerance: float
    accept_lens: bool = False
    presence: bool = False

    @classmethod
    def of(cls, run: Run, arm: str, *, accept_lens: bool = False, presence: bool = False) -> Terms:
        """Terms with the tolerances of the run's dtype."""
        dtype = run.setup.dtype
        return cls(
            arm=arm,
            logprob_tolerance=LOGPROB_TOLERANCE[dtype],
            row_tolerance=ROW_TOLERANCE[dtype],
            accept_lens=accept_lens,
            presence=presence,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """One sample of one request in both runs (`twin` is the other's request). `cut` says that an abort may have cut
    either of them short."""

    request: Request
    twin: Request
    key: Key
    got: Completion
    right: Completion
    cut: bool


def repeatable(request: Request, *, seeded: bool = False) -> bool:
    """Whether a request must come out the same twice: greedy, or (when asked) with a seed of its own."""
    return request.sampling.greedy or (seeded and request.sampling.seed is not None)


def paired(
    invariant: str, run: Run, other: Run, arm: str, *, seeded: bool = False, all_of_run: bool = True
) -> tuple[list[Pair], list[Violation]]:
    """Completions of the repeatable requests that both runs have, and the faults of either side.

    Raises `Misuse` when the runs do not hold the same requests: other prompts, or (with `all_of_run`) one missing, or
    nothing left to compare.
    """
    mine, out = sound_completions(invariant, run)
    theirs, flaws = sound_completions(invariant, other, arm=f"{arm}: ")
    others = {request.request_id: request for request in other.requests}
    pairs = []
    compared = 0
    for request, key in wanted_keys(run):
        twin = others.get(request.request_id)
        if twin is None and all_of_run:
            raise Misuse(f"{arm}: has no request {request.request_id!r}; run the same requests in both")
        if twin is None or not repeatable(request, seeded=seeded):
            continue
        if tuple(twin.prompt_token_ids) != tuple(request.prompt_token_ids):
            raise Misuse(f"{arm}: request {request.request_id!r} has another prompt; compare runs of the same requests")
        compared += 1
        if key in mine and key in theirs:
            cut = request.abort_step is not None or twin.abort_step is not None
            pairs.append(Pair(request, twin, key, mine[key], theirs[key], cut))
    if compared == 0:
        raise Misuse(
            f"{arm}: no request to compare; both runs need a common one that is greedy (or seeded, where asked)"
        )
    return pairs, out + flaws


def first_difference(got: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length when one is a prefix, None when equal."""
    if tuple(got) == tuple(right):
        return None
    pairs = zip(got, right, strict=False)
    return next((row for row, (a, b) in enumerate(pairs) if a != b), min(len(got), len(right)))


def token_at(tokens: Sequence[int], row: int) -> object:
    return tokens[row] if row < len(tokens) else "the end"


def compare(invariant: str, pair: Pair, terms: Terms) -> list[Violation]:
    """Everything that must be equal. A token difference is reported alone: what follows it is its consequence."""
    got, right = pair.got, pair.right
    row = first_difference(got.token_ids, right.token_ids)
    shorter = min(len(got.token_ids), len(right.token_ids))
    if pair.cut and (row is None or row == shorter):
        return compare_rows(invariant, pair, terms, shorter)
    if row is not None:
        return [token_fault(invariant, pair, terms, row)]
    out = [
        blame(invariant, pair.key, f"{name} differs from the {terms.arm}", expected=value(right), got=value(got))
        for name, value in _SCALARS.items()
        if value(got) != value(right) and (terms.presence or None not in (value(got), value(right)))
    ]
    if terms.accept_lens:
        out += _lens(invariant, pair, terms)
    if terms.presence:
        out += _presence(invariant, pair, terms)
    return out + _pooled(invariant, pair, terms) + compare_rows(invariant, pair, terms, shorter)


_SCALARS: dict[str, Callable[[Completion], object]] = {
    "finish_reason": lambda done: done.finish_reason,
    "text": lambda done: done.text,
    "usage.completion_tokens": lambda done: done.usage.completion_tokens,
    "usage.prompt_tokens": lambda done: done.usage.prompt_tokens,
}


def token_fault(invariant: str, pair: Pair, terms: Terms, row: int) -> Violation:
    """The violation for a first differing token at output index `row`."""
    return blame(
        invariant,
        pair.key,
        f"tokens differ from the {terms.arm}",
        position=len(pair.right.prompt_token_ids) + row,
        row=row,
        expected=token_at(pair.right.token_ids, row),
        got=token_at(pair.got.token_ids, row),
    )


def _lens(invariant: str, pair: Pair, terms: Terms) -> list[Violation]:
    out = []
    for name in ("accept_lens", "draft_lens"):
        got, right = getattr(pair.got, name), getattr(pair.right, name)
        if got is not None and right is not None and tuple(got) != tuple(right):
            row = first_difference(got, right)
            message = f"{name} differ from the {terms.arm}"
            out.append(blame(invariant, pair.key, message, row=row, expected=tuple(right), got=tuple(got)))
    return out


def _pooled(invariant: str, pair: Pair, terms: Terms) -> list[Violation]:
    """The mean hidden row of two whole outputs, where both have it and pool the same rows."""
    got, right = pair.got.pooled_hidden, pair.right.pooled_hidden
    if got is None or right is None or pair.request.pooled_hidden != pair.twin.pooled_hidden:
        return []
    if got.shape != right.shape:
        message = f"pooled hidden row differs in width from the {terms.arm}"
        return [blame(invariant, pair.key, message, expected=tuple(right.shape), got=tuple(got.shape))]
    error = float(row_errors(plain(got)[None], plain(right)[None])[0])
    if error <= terms.row_tolerance:
        return []
    right_row, got_row = show_difference(right, got)
    message = f"pooled hidden row differs from the {terms.arm} by {error:.3g}"
    return [blame(invariant, pair.key, message, expected=right_row, got=got_row)]


def _presence(invariant: str, pair: Pair, terms: Terms) -> list[Violation]:
    out = []
    for name in ("logprobs", "prompt_logprobs", "hidden_states", "pooled_hidden"):
        there = [getattr(done, name) is not None for done in (pair.right, pair.got)]
        if there[0] != there[1]:
            state = ["given" if yes else "not given" for yes in there]
            message = f"{name} is given in only one of the run and the {terms.arm}"
            out.append(blame(invariant, pair.key, message, expected=state[0], got=state[1]))
    return out


def compare_rows(invariant: str, pair: Pair, terms: Terms, tokens: int) -> list[Violation]:
    """Logprobs and hidden states of the prompt and the first `tokens` output tokens, where both runs have them."""
    got, right, prompt_len = pair.got, pair.right, len(pair.request.prompt_token_ids)
    out: list[Violation] = []
    for name, start, limit in (("prompt_logprobs", 0, prompt_len), ("logprobs", prompt_len, tokens)):
        mine, theirs = getattr(got, name), getattr(right, name)
        if mine is not None and theirs is not None:
            mine, theirs = mine[:limit], theirs[:limit]
            if len(mine) != len(theirs):
                message = f"{name} rows differ in number from the {terms.arm}"
                out.append(blame(invariant, pair.key, message, expected=len(theirs), got=len(mine)))
            out += _logprob_rows(invariant, pair, terms, name, start, list(zip(mine, theirs, strict=False)))
    if got.hidden_states is not None and right.hidden_states is not None:
        rows = prompt_len + max(tokens - 1, 0)
        out += compare_hidden(invariant, pair.key, got.hidden_states, right.hidden_states, terms, rows)
    return out


def _logprob_rows(
    invariant: str,
    pair: Pair,
    terms: Terms,
    name: str,
    start: int,
    rows: Sequence[tuple[LogprobRow | None, LogprobRow | None]],
) -> list[Violation]:
    message = f"{name} differ from the {terms.arm}"
    return [
        blame(invariant, pair.key, message, position=start + row, row=row, expected=right, got=got)
        for row, (got, right) in enumerate(rows)
        if not same_logprob_row(got, right, terms.logprob_tolerance)
    ]


def same_logprob_row(got: LogprobRow | None, right: LogprobRow | None, tolerance: float) -> bool:
    """Equality of two rows; ties within the tolerance may be ordered, ranked and cut off either way."""
    if got is None or right is None:
        return got is right
    if got.token_id != right.token_id or not same_logprob(got.logprob, right.logprob, tolerance):
        return False
    if _ranked_clearly(got, tolerance) and _ranked_clearly(right, tolerance) and got.rank != right.rank:
        return False
    if len(got.top) != len(right.top):
        return False
    mine, theirs = dict(got.top), dict(right.top)
    if any(not same_logprob(mine[token_id], theirs[token_id], tolerance) for token_id in mine.keys() & theirs.keys()):
        return False
    border = max(right.top[-1][1], got.top[-1][1]) if right.top else 0.0
    odd = [mine.get(token_id, theirs.get(token_id, 0.0)) for token_id in mine.keys() ^ theirs.keys()]
    return all(same_logprob(value, border, 2 * tolerance) for value in odd)


def _ranked_clearly(row: LogprobRow, tolerance: float) -> bool:
    """Whether the row's own top list proves its rank: it reaches the token, and nothing in it ties with the token."""
    rivals = [logprob for token_id, logprob in row.top if token_id != row.token_id]
    reached = any(token_id == row.token_id for token_id, _ in row.top)
    return reached and not any(same_logprob(rival, row.logprob, 2 * tolerance) for rival in rivals)


def compare_hidden(
    invariant: str, key: Key, got: HiddenStates, right: HiddenStates, terms: Terms, rows: int
) -> list[Violation]:
    """Compare the first `rows` hidden rows (prompt included) one by one."""
    mine, theirs = [*got.prefill, *got.decode][:rows], [*right.prefill, *right.decode][:rows]
    out = []
    if len(mine) != len(theirs):
        message = f"hidden rows differ in number from the {terms.arm}"
        out.append(blame(invariant, key, message, expected=len(theirs), got=len(mine)))
    for row, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a.shape != b.shape:
            message = f"hidden rows differ in width from the {terms.arm}"
            return [*out, blame(invariant, key, message, row=row, expected=tuple(b.shape), got=tuple(a.shape))]
    both = min(len(mine), len(theirs))
    if both == 0:
        return out
    values, truth = _stack(mine[:both]), _stack(theirs[:both])
    errors = row_errors(values, truth)
    for row in torch.nonzero(~(errors <= terms.row_tolerance)).flatten().tolist():
        message = f"hidden row differs from the {terms.arm} by {errors[row]:.3g}"
        right_row, got_row = show_difference(truth[row], values[row])
        out.append(blame(invariant, key, message, position=row, row=row, expected=right_row, got=got_row))
    return out


def _stack(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([plain(row) for row in rows])
