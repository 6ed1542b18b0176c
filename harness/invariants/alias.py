"""ALIAS: every row belongs to the request and position it is delivered for, and to nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from harness.contract import Completion, Run
from harness.invariants.base import Key, Misuse, Violation, blame, invariant
from harness.invariants.rows import ROW_TOLERANCE, matching_rows, plain, row_errors, show_difference
from harness.invariants.wellformed import is_row, sound_completions, sound_deltas

Rows = Callable[[tuple[int, ...]], torch.Tensor]
"""Token ids -> [len, width]: the final-norm row of every position."""

States = Callable[[tuple[int, ...]], torch.Tensor]
"""Token ids -> [len, layers, width]: the residual stream of the chosen layers at every position."""

NameRow = Callable[[torch.Tensor], str]
"""One row [width] -> what it says (its token, history, position), as a known-answer checkpoint decodes it."""

_fault = partial(blame, "ALIAS-1")


@dataclass(frozen=True, slots=True)
class _Truth:
    """Expected rows of every request, for comparing and for finding where a stranger came from."""

    by_key: dict[Key, torch.Tensor]
    tolerance: float
    name_row: NameRow | None

    def differs(self, got: torch.Tensor, expected: torch.Tensor) -> list[int]:
        """Rows that are wrong by value, or that decode to another name (coarse dtypes hide what a decoder can tell)."""
        errors = row_errors(got, expected)
        wrong = {int(row) for row in torch.nonzero(~(errors <= self.tolerance)).flatten()}
        if self.name_row is not None:
            wrong |= {i for i in range(got.shape[0]) if self.name_row(got[i]) != self.name_row(expected[i])}
        return sorted(wrong)

    def show(self, expected: torch.Tensor, got: torch.Tensor) -> tuple[str, str]:
        if self.name_row is None:
            return show_difference(expected, got)
        return self.name_row(expected), self.name_row(got)

    def origin(self, row: torch.Tensor, key: Key) -> str:
        places = []
        for owner in sorted(self.by_key, key=lambda other: other != key):
            for match in matching_rows(row, self.by_key[owner], self.tolerance):
                who = "the same request" if owner == key else f"request {owner[0]!r}"
                places.append(f"row {match} of {who}" + (f" sample {owner[1]}" if owner[1] else ""))
        known = f"this is {' or '.join(places[:3])}" if places else "no request's row"
        if torch.isnan(row).any():
            return "NaN: unwritten or freed memory"
        return known if self.name_row is None else f"{known}; it says: {self.name_row(row)}"


@invariant(
    "ALIAS-1",
    statement="each hidden row and logprob row belongs to its request and position (identity by value, not by count), "
    "for ragged accept lengths and batch > 1",
    needs={"hidden", "known_answer"},
)
def alias_1(run: Run, rows: Rows, name_row: NameRow | None = None, tolerance: float | None = None) -> list[Violation]:
    """Compare every delivered hidden row with the row of its own tokens.

    `rows` gives the truth; `name_row` decodes a row for the message and, where values are coarse, decides equality.
    `tolerance` defaults to `ROW_TOLERANCE` of the engine's dtype.
    """
    found, out = sound_completions("ALIAS-1", run)
    limit = ROW_TOLERANCE[run.setup.dtype] if tolerance is None else tolerance
    sequences = {key: (*done.prompt_token_ids, *done.token_ids[:-1]) for key, done in found.items()}
    expected = {key: plain(rows(sequence)) for key, sequence in sequences.items()}
    for key, sequence in sequences.items():
        if expected[key].ndim != 2 or expected[key].shape[0] != len(sequence):
            raise Misuse(
                f"rows={tuple(expected[key].shape)}: must be [{len(sequence)}, width] for {len(sequence)} tokens"
            )
    truth = _Truth(expected, limit, name_row)
    for key, done in found.items():
        out += _logprob_owners(key, done)
        if done.hidden_states is not None:
            hidden = done.hidden_states
            out += _compare(truth, key, "hidden row", [*hidden.prefill, *hidden.decode])
        elif run.request(key[0]).return_hidden_states and done.token_ids:
            out.append(_fault(key, "hidden states are missing", expected=f"{len(sequences[key])} rows", got="nothing"))
    return out + _delivered(run, truth, found)


@invariant("ALIAS-1", needs={"layer_states", "known_answer"})
def alias_1_layers(run: Run, states: States, tolerance: float | None = None) -> list[Violation]:
    """Compare what a drafter kept of the chosen layers with the states of each request's own tokens, row by row.

    `states` gives the truth. An aborted request may have none; what it has must be right.
    """
    assert run.setup.drafter is not None
    layers = run.setup.drafter.aux_layer_ids
    found, out = sound_completions("ALIAS-1", run)
    limit = ROW_TOLERANCE[run.setup.dtype] if tolerance is None else tolerance
    sequences = {key: (*done.prompt_token_ids, *done.token_ids)[:-1] for key, done in found.items()}
    expected = {key: plain(states(sequence)) for key, sequence in sequences.items()}
    for key, done in found.items():
        if done.layer_states is None:
            if done.finish_reason != "abort":
                out.append(_fault(key, "layer states are missing", expected=list(expected[key].shape), got="nothing"))
            continue
        if done.layer_states.shape[1] != len(layers):
            message = "layer states are not of the layers that were asked for"
            out.append(_fault(key, message, expected=list(layers), got=list(done.layer_states.shape)))
            continue
        for place, layer in enumerate(layers):
            truth = _Truth({owner: rows[:, place] for owner, rows in expected.items()}, limit, None)
            out += _compare(truth, key, f"state entering layer {layer}", list(done.layer_states[:, place]))
    return out


def _compare(truth: _Truth, key: Key, what: str, got: list[torch.Tensor]) -> list[Violation]:
    expected = truth.by_key[key]
    if any(not is_row(row, expected.shape[1]) for row in got):
        widths = sorted({tuple(row.shape) for row in got})
        message = f"{what}s are not of the expected width"
        return [_fault(key, message, expected=(expected.shape[1],), got=widths)]
    out = []
    if len(got) != expected.shape[0]:
        message = f"{what}s differ in number from the tokens that were inputs"
        out.append(_fault(key, message, expected=expected.shape[0], got=len(got)))
    both = min(len(got), expected.shape[0])
    if both == 0:
        return out
    values = torch.stack([plain(row) for row in got[:both]])
    for row in truth.differs(values, expected[:both]):
        right, mine = truth.show(expected[row], values[row])
        out.append(
            _fault(
                key,
                f"{what} is not that of its request and position",
                position=row,
                row=row,
                expected=right,
                got=mine,
                origin=truth.origin(values[row], key),
            )
        )
    return out


def _logprob_owners(key: Key, done: Completion) -> Iterator[Violation]:
    """Logprob rows name their token, so a foreign or shifted row shows without knowing its value."""
    prompt_len = len(done.prompt_token_ids)
    for start, rows, tokens in (
        (0, done.prompt_logprobs or (), done.prompt_token_ids),
        (prompt_len, done.logprobs or (), done.token_ids),
    ):
        for row, (entry, token_id) in enumerate(zip(rows, tokens, strict=False)):
            if entry is not None and entry.token_id != token_id:
                message = "logprob row is about another token than the one at its position"
                yield _fault(key, message, position=start + row, row=row, expected=token_id, got=entry.token_id)


def _delivered(run: Run, truth: _Truth, found: dict[Key, Completion]) -> list[Violation]:
    """The rows that steps delivered, put together, must be the same rows as those of the completion."""
    deltas, out = sound_deltas("ALIAS-1", run)
    for key, parts in deltas.items():
        rows = [row for _, delta in parts if delta.prefill_hidden is not None for row in delta.prefill_hidden]
        rows += [row for _, delta in parts for row in delta.decode_hidden]
        if key in found and rows:
            out += _compare(truth, key, "hidden row delivered by a step", rows)
    return out
