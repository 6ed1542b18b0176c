"""What the page shows of a recorded run, as plain numbers: its acceptance, its verify steps and its hidden rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.contract import PLACEHOLDER, Run
from harness.invariants.base import Key
from harness.invariants.rows import ROW_TOLERANCE, matching_rows, plain, row_errors
from harness.invariants.trace import VerifyRow, rows_of
from harness.invariants.wellformed import is_row, sound_completions
from harness.known_answer import FAMILIES, Target
from harness.record import read
from harness.workloads.known import known_family
from harness.workloads.lanes import LANES, DrafterLane


@dataclass(frozen=True, slots=True)
class Accepted:
    """Of one request: accept length and number of drafts of each verify step."""

    accept_lens: tuple[int, ...]
    draft_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One request in one verify step: node 0 is the last committed token (None: not known), node i + 1 draft i, whose
    parent is `parents[i]`. `path` are the accepted nodes below the root, `last` the token that the target added."""

    owner: str
    step: int
    root: int | None
    drafts: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    last: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """A delivered hidden row. `source` is the (request, row) whose row it is, None where it is nobody's; `others`: how
    many further rows it equals. `says` is what it decodes to where it is wrong."""

    source: tuple[str, int] | None
    says: str = ""
    others: int = 0

    @property
    def is_traced(self) -> bool:
        return self.source is not None and not self.others


@dataclass(frozen=True, slots=True)
class Strip:
    """The hidden rows of one request: row i belongs to position i of prompt and output together."""

    owner: str
    prompt_len: int
    rows: tuple[Row, ...]

    def is_right(self, place: int) -> bool:
        return self.rows[place].source == (self.owner, place)

    @property
    def wrong(self) -> list[int]:
        return [place for place in range(len(self.rows)) if not self.is_right(place)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """`k` is the depth of the drafts. `strips` is empty where the truth about the rows is not known."""

    label: str
    engine: str
    version: str
    lane: str
    k: int
    accepted: tuple[Accepted, ...] = ()
    blocks: tuple[Block, ...] = ()
    strips: tuple[Strip, ...] = ()

    @property
    def wrong_rows(self) -> int:
        return sum(len(strip.wrong) for strip in self.strips)

    @property
    def traced_rows(self) -> int:
        """Wrong ones that can only have come from one place."""
        return sum(strip.rows[place].is_traced for strip in self.strips for place in strip.wrong)

    @property
    def readable(self) -> bool:
        """Whether any row is known. None is where another family ran, or where a check wrote over what it was given."""
        return any(row.source is not None for strip in self.strips for row in strip.rows)


def recording(folder: Path, label: str, family: str = "") -> Recording:
    """Raises `BadTrace`. `family`: the known-answer family that ran; without it, what the target's folder is called."""
    run = read(folder)
    lane, drafter = _lane(run), run.setup.drafter
    name = lane.name if lane is not None else drafter.method if drafter is not None else "none"
    return Recording(
        label=label,
        engine=run.capabilities.engine,
        version=run.capabilities.version,
        lane=name,
        k=drafter.num_steps if drafter is not None else 0,
        accepted=tuple(_accepted(run)),
        blocks=tuple(_blocks(run)),
        strips=tuple(_strips(run, _target(run, lane, family))),
    )


def _lane(run: Run) -> DrafterLane | None:
    drafter = run.setup.drafter
    if drafter is None:
        return LANES["none"]
    shape = drafter.method, drafter.topk > 1
    return next((lane for lane in LANES.values() if (lane.method, lane.topk > 1) == shape), None)


def _target(run: Run, lane: DrafterLane | None, family: str) -> Target | None:
    target = run.setup.target
    named = family or target.parent.name
    if named not in FAMILIES or lane is None:
        return None
    known = known_family(named, run.setup.dtype)
    return known.drafters[lane.folder].target if lane.within_target and target.name == lane.folder else known.target


def _accepted(run: Run) -> Iterator[Accepted]:
    if run.setup.drafter is None:
        return
    for done in run.completions:
        if done.accept_lens:
            drafted = done.draft_lens or tuple(run.setup.drafter.num_steps for _ in done.accept_lens)
            yield Accepted(done.accept_lens, drafted)


def _blocks(run: Run) -> Iterator[Block]:
    tokens = {request.request_id: list(request.prompt_token_ids) for request in run.requests}
    written: dict[Key, list[int]] = {}
    for step in run.steps:
        if step.verify is not None:
            parents = _parents(step.verify.draft_parents, step.verify.draft_token_ids)
            for row in rows_of(run, step):
                if not row.discarded:
                    yield _block(row, written.get(row.key) or tokens.get(row.key[0], []), parents[row.row])
        for delta in step.deltas:
            key = delta.request_id, delta.index
            written.setdefault(key, list(tokens.get(delta.request_id, []))).extend(delta.token_ids)


def _parents(told: torch.Tensor | None, drafts: torch.Tensor) -> list[list[int]]:
    """Each draft behind the one before it, unless the trace has parents that come before their children."""
    places = torch.arange(drafts.shape[1])
    if told is not None and told.shape == drafts.shape and bool(((told >= 0) & (told <= places)).all()):
        chains: list[list[int]] = told.tolist()
        return chains
    return [list(range(drafts.shape[1])) for _ in range(drafts.shape[0])]


def _block(row: VerifyRow, before: Sequence[int], parents: Sequence[int]) -> Block:
    path: list[int] = []
    for token in row.block[:-1]:
        here = path[-1] if path else 0
        children = [i + 1 for i, parent in enumerate(parents) if parent == here and row.drafts[i] == token]
        if not children:
            break
        path.append(children[0])
    return Block(
        owner=_who(row.key),
        step=row.step,
        root=before[-1] if before else None,
        drafts=row.drafts,
        parents=tuple(parents),
        path=tuple(path),
        last=row.block[-1] if row.block and row.block[-1] != PLACEHOLDER else None,
    )


def _strips(run: Run, target: Target | None) -> Iterator[Strip]:
    found, _ = sound_completions("ALIAS-1", run)
    inputs = {key: (*done.prompt_token_ids, *done.token_ids)[:-1] for key, done in found.items()}
    known = target is not None and all(0 <= t < target.vocab_size for tokens in inputs.values() for t in tokens)
    if target is None or not known:
        return
    truth = {key: target.hidden_rows(tokens) for key, tokens in inputs.items() if tokens}
    tolerance = ROW_TOLERANCE[run.setup.dtype]
    for key, done in found.items():
        if done.hidden_states is None or key not in truth:
            continue
        got = (*done.hidden_states.prefill, *done.hidden_states.decode)
        rows = tuple(_row(row, place, key, truth, tolerance, target) for place, row in enumerate(got))
        yield Strip(_who(key), len(done.prompt_token_ids), rows)


def _row(
    got: torch.Tensor, place: int, key: Key, truth: dict[Key, torch.Tensor], tolerance: float, target: Target
) -> Row:
    mine = truth[key]
    if not is_row(got, mine.shape[1]):
        return Row(None, f"shape {tuple(got.shape)}")
    value = plain(got)
    if place < len(mine) and float(row_errors(value[None], mine[place : place + 1])) <= tolerance:
        return Row((_who(key), place))
    matches = [(_who(owner), match) for owner in truth for match in matching_rows(value, truth[owner], tolerance)]
    if matches:
        return Row(matches[0], _says(value, place, target), len(matches) - 1)
    return Row(None, "not finite" if not bool(torch.isfinite(value).all()) else _says(value, place, target))


def _says(row: torch.Tensor, place: int, target: Target) -> str:
    reading = target.decode_row(row, place)
    return f"token {reading.token}" + (f" of alphabet {reading.owner}" if reading.owner is not None else "")


def _who(key: Key) -> str:
    return f"{key[0]}#{key[1]}" if key[1] else key[0]
