"""ALIAS-1 for means of hidden rows: a mean is that of the rows it stands for, all of them, each once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from harness.contract import Completion, Request, Run
from harness.invariants.alias import Rows
from harness.invariants.base import Key, Misuse, Violation, blame, invariant
from harness.invariants.rows import ROW_TOLERANCE, plain, row_errors, show_difference
from harness.invariants.wellformed import is_row, sound_completions

_fault = partial(blame, "ALIAS-1")


@invariant("ALIAS-1", needs={"pooled", "known_answer"})
def alias_1_pooled(run: Run, rows: Rows, tolerance: float | None = None) -> list[Violation]:
    """Compare every `pooled_hidden` with the mean of the rows of its request's own tokens, as `rows` gives them.

    Where there is no row to pool (an output of one token, an abort before the first), nothing may be delivered; nor may
    it for who did not ask. `tolerance` defaults to `ROW_TOLERANCE` of the engine's dtype.
    """
    found, out = sound_completions("ALIAS-1", run)
    limit = ROW_TOLERANCE[run.setup.dtype] if tolerance is None else tolerance
    truth = {key: _rows_of(done, rows) for key, done in found.items()}
    for key, done in found.items():
        request = run.request(key[0])
        expected = _expected(request, done, truth[key])
        got = done.pooled_hidden
        if expected is None or got is None:
            if expected is not None or (got is not None and done.token_ids):
                states = ["nothing" if value is None else "a mean" for value in (expected, got)]
                message = "pooled hidden row is missing" if got is None else "pooled hidden row of no rows"
                out.append(_fault(key, message, expected=states[0], got=states[1]))
        elif not is_row(got, len(expected)):
            message = "pooled hidden row is not of the expected width"
            out.append(_fault(key, message, expected=(len(expected),), got=tuple(got.shape)))
        elif not _same(plain(got), expected, limit):
            right, mine = show_difference(expected, got)
            message = f"pooled hidden row is not the mean of its {request.pooled_hidden} rows"
            origin = next(_origins(plain(got), key, truth, len(done.prompt_token_ids), limit), None)
            out.append(_fault(key, message, expected=right, got=mine, origin=origin or "no mean that is known"))
    return out


def _rows_of(done: Completion, rows: Rows) -> torch.Tensor:
    """[prompt + output, width]: the rows of all tokens, that of the last, which was no input, included."""
    sequence = (*done.prompt_token_ids, *done.token_ids)
    known = plain(rows(sequence))
    if known.ndim != 2 or known.shape[0] != len(sequence):
        raise Misuse(f"rows={tuple(known.shape)}: must be [{len(sequence)}, width] for {len(sequence)} tokens")
    return known


def _expected(request: Request, done: Completion, rows: torch.Tensor) -> torch.Tensor | None:
    prompt_len = len(done.prompt_token_ids)
    if request.pooled_hidden is None or not done.token_ids:
        return None
    first = prompt_len if request.pooled_hidden == "output" else 0
    last = prompt_len if request.pooled_hidden == "prompt" else len(rows) - 1
    return rows[first:last].mean(0) if last > first else None


def _same(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool(row_errors(got[None], expected[None])[0] <= tolerance)


def _origins(
    got: torch.Tensor, key: Key, truth: dict[Key, torch.Tensor], prompt_len: int, tolerance: float
) -> Iterator[str]:
    """What a wrong mean may be: of other rows of the request, of another request, or no mean at all."""
    own = truth[key]
    parts = {
        "the mean of its prompt rows": own[:prompt_len],
        "the mean of its output rows": own[prompt_len:-1],
        "the mean of all its rows": own[:-1],
        "the mean with the row of the last token, which was no input": own,
        "the mean of its output rows and that of the last token": own[prompt_len:],
        "its last row alone": own[-2:-1],
    }
    for key_, rows in truth.items():
        if key_ != key:
            who = f"request {key_[0]!r}" + (f" sample {key_[1]}" if key_[1] else "")
            parts |= {f"the mean of all rows of {who}": rows[:-1], f"the mean of the rows of {who}": rows}
    for name, rows in parts.items():
        if len(rows) and _same(got, rows.mean(0), tolerance):
            yield f"this is {name}"
        elif len(rows) > 1 and _same(got, rows.sum(0), tolerance):
            yield f"this is {name}, times their number"
    if torch.isnan(got).any():
        yield "NaN: unwritten or freed memory"
