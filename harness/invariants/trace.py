"""Reading verify traces row by row, and telling which request an owner name means."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from harness.contract import PLACEHOLDER, Run, StepTrace, VerifyTrace
from harness.invariants.base import Key, Violation
from harness.invariants.wellformed import is_ids


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One request in one verify step. `drafts` and `emitted` keep their placeholders."""

    step: int
    row: int
    key: Key
    accept_len: int
    drafts: tuple[int, ...]
    emitted: tuple[int, ...]
    discarded: bool

    @property
    def num_drafts(self) -> int:
        return sum(token_id != PLACEHOLDER for token_id in self.drafts)

    @property
    def block(self) -> tuple[int, ...]:
        """The tokens that this step accepted: correct drafts and the bonus token."""
        return self.emitted[: max(self.accept_len, 0)]


def key_of(run: Run, owner: str) -> Key:
    """`request id` or `request id#index` -> key. A request id that holds '#' itself wins over the split."""
    return _key({request.request_id for request in run.requests}, owner)


def _key(request_ids: Collection[str], owner: str) -> Key:
    if owner in request_ids:
        return owner, 0
    request_id, mark, index = owner.rpartition("#")
    return (request_id, int(index)) if mark and index.isdecimal() else (owner, 0)


def is_known(run: Run, key: Key) -> bool:
    return any(request.request_id == key[0] and key[1] < request.sampling.n for request in run.requests)


def is_id_matrix(value: object, rows: int) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == 2
        and value.shape[0] == rows
        and not value.is_floating_point()
        and not value.is_complex()
        and value.dtype != torch.bool
    )


def verify_flaw(verify: VerifyTrace) -> str | None:
    """Why a verify trace cannot be read row by row, or None."""
    rows = len(verify.request_ids)
    if not is_id_matrix(verify.draft_token_ids, rows):
        return f"draft_token_ids must be [{rows}, num_draft_tokens - 1] integers"
    if not is_id_matrix(verify.emitted, rows):
        return f"emitted must be [{rows}, num_steps + 1] integers"
    if not is_ids(verify.accept_lens) or len(verify.accept_lens) != rows:
        return f"accept_lens must be {rows} integers"
    if len(verify.discarded) != rows:
        return f"discarded must have {rows} entries"
    return None


def rows_of(run: Run, step: StepTrace) -> Iterator[VerifyRow]:
    """The rows of a step whose verify trace has no flaw."""
    verify = step.verify
    if verify is None or verify_flaw(verify) is not None:
        return
    drafts, emitted = verify.draft_token_ids.tolist(), verify.emitted.tolist()
    ids = frozenset(request.request_id for request in run.requests)
    for row, owner in enumerate(verify.request_ids):
        yield VerifyRow(
            step=step.step,
            row=row,
            key=_key(ids, owner),
            accept_len=verify.accept_lens[row],
            drafts=tuple(drafts[row]),
            emitted=tuple(emitted[row]),
            discarded=bool(verify.discarded[row]),
        )


def verify_rows(invariant: str, run: Run) -> tuple[list[VerifyRow], list[Violation]]:
    """Every row of every readable verify trace in order, and a violation for each trace that cannot be read."""
    rows: list[VerifyRow] = []
    out: list[Violation] = []
    for step in run.steps:
        flaw = verify_flaw(step.verify) if step.verify is not None else None
        if flaw is not None:
            out.append(Violation(invariant=invariant, step=step.step, message=f"unreadable verify trace: {flaw}"))
        rows += rows_of(run, step)
    return rows, out


def counted_rows(rows: list[VerifyRow]) -> dict[Key, list[VerifyRow]]:
    """Rows that count for their request (it had not finished before), by key."""
    counted: dict[Key, list[VerifyRow]] = {}
    for row in rows:
        if not row.discarded:
            counted.setdefault(row.key, []).append(row)
    return counted
