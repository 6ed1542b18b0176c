"""STATE: what the engine keeps for a request is what a fresh engine would compute from its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.contract import Run, StateSnapshot, StepTrace
from harness.invariants.base import Key, Misuse, Violation, blame, invariant
from harness.invariants.rows import ROW_TOLERANCE, matching_rows, plain, row_errors, show_difference
from harness.invariants.trace import is_known, key_of
from harness.invariants.wellformed import is_ids

Fresh = Callable[[tuple[int, ...]], StateSnapshot]
"""Committed token ids -> the state after one unchunked, uncached prefill of them in a new engine."""

KV_FIELDS = ("target_kv", "draft_kv")
ROW_FIELDS = ("draft_input_ids", "draft_features")


@dataclass(frozen=True, slots=True)
class _Scene:
    """One snapshot, its fresh twin, and the fresh twins of the others of that step (to name a foreign row)."""

    key: Key
    step: int
    got: StateSnapshot
    right: StateSnapshot
    others: Sequence[tuple[str, StateSnapshot]]
    tolerance: float


@invariant(
    "STATE-1",
    statement="after each step, draft KV and draft inputs equal those of a fresh draft prefill over the committed "
    "tokens; target KV and recurrent state equal a sequential replay",
    needs={"snapshots", "known_answer"},
)
def state_1(run: Run, fresh: Fresh, tolerance: float | None = None) -> list[Violation]:
    """Compare every snapshot with `fresh` of its tokens. `tolerance` defaults to `ROW_TOLERANCE` of the dtype."""
    limit = ROW_TOLERANCE[run.setup.dtype] if tolerance is None else tolerance
    known: dict[tuple[int, ...], StateSnapshot] = {}
    out: list[Violation] = []
    for step in run.steps:
        sound, flaws = _sound(run, step)
        out += flaws
        for tokens in {tuple(snapshot.token_ids) for _, snapshot in sound} - known.keys():
            known[tokens] = fresh(tokens)
        twins = [(snapshot.owner, known[tuple(snapshot.token_ids)]) for _, snapshot in sound]
        for key, snapshot in sound:
            others = [(owner, twin) for owner, twin in twins if owner != snapshot.owner]
            scene = _Scene(key, step.step, snapshot, known[tuple(snapshot.token_ids)], others, limit)
            out += [*_kv(scene), *_fed(scene), *_recurrent(scene, known)]
    return out


def _sound(run: Run, step: StepTrace) -> tuple[list[tuple[Key, StateSnapshot]], list[Violation]]:
    """Snapshots that can be compared: of a known request, with the tokens that it really has."""
    completions = {(done.request_id, done.index): done for done in run.completions}
    sound, out = [], []
    for snapshot in step.snapshots:
        key = key_of(run, snapshot.owner)
        if not is_known(run, key) or not is_ids(snapshot.token_ids):
            message = "snapshot of an unknown owner, or without integer token ids"
            out.append(Violation(invariant="STATE-1", step=step.step, message=message, got=snapshot.owner))
            continue
        sound.append((key, snapshot))
        done, prompt = completions.get(key), tuple(run.request(key[0]).prompt_token_ids)
        final = (*prompt, *done.token_ids) if done is not None and is_ids(done.token_ids) else prompt
        tokens = tuple(snapshot.token_ids)
        both = min(len(tokens), len(final))
        if tokens[:both] != final[:both]:
            position = next(place for place in range(both) if tokens[place] != final[place])
            message = "the committed tokens of the engine are not those of the request"
            right, got = final[position], tokens[position]
            out.append(blame("STATE-1", key, message, step=step.step, position=position, expected=right, got=got))
    return sound, out


def _both(scene: _Scene, name: str) -> tuple[torch.Tensor, torch.Tensor] | Violation | None:
    """The field in both snapshots as float64, a violation when they cannot be compared, None when neither has it."""
    got, right = getattr(scene.got, name), getattr(scene.right, name)
    if got is None and right is None:
        return None
    if right is not None and not isinstance(right, torch.Tensor):
        raise Misuse(f"fresh.{name}={type(right).__name__}: must be a tensor or None")
    shapes = [list(value.shape) if isinstance(value, torch.Tensor) else repr(value) for value in (right, got)]
    if got is None or right is None or shapes[0] != shapes[1]:
        message = f"{name} has not the shape of a fresh one over {len(scene.got.token_ids)} committed tokens"
        return blame("STATE-1", scene.key, message, step=scene.step, expected=shapes[0], got=shapes[1])
    return plain(got), plain(right)


def _kv(scene: _Scene) -> Iterator[Violation]:
    """KV per layer and per K or V: the first wrong position of each, and how many more."""
    for name in KV_FIELDS:
        pair = _both(scene, name)
        if isinstance(pair, Violation):
            yield pair
        elif pair is not None and pair[1].ndim != 5:
            raise Misuse(f"fresh.{name}: must be [rows, layers, 2, kv_heads, head_dim], not {list(pair[1].shape)}")
        elif pair is not None:
            got, right = pair
            for layer in range(right.shape[1]):
                for half in range(right.shape[2]):
                    label = f"{name}, layer {layer}, {'KV'[half]}"
                    pools = _pools(scene, name, layer, half)
                    yield from _rows(scene, label, got[:, layer, half], right[:, layer, half], pools)


def _pools(scene: _Scene, name: str, layer: int, half: int) -> list[tuple[str, torch.Tensor]]:
    """The same layer and half of every fresh state of this step, own first."""
    states = [("the same request", scene.right), *((f"{owner!r}", state) for owner, state in scene.others)]
    found = [(who, getattr(state, name)) for who, state in states]
    return [(who, plain(kv)[:, layer, half]) for who, kv in found if isinstance(kv, torch.Tensor) and kv.ndim == 5]


def _fed(scene: _Scene) -> Iterator[Violation]:
    """What the drafter was fed: ids exactly, features within the tolerance."""
    for name in ROW_FIELDS:
        pair = _both(scene, name)
        if isinstance(pair, Violation):
            yield pair
        elif pair is not None:
            states = [("the same request", scene.right), *((f"{owner!r}", state) for owner, state in scene.others)]
            pools = [(who, getattr(state, name)) for who, state in states]
            tensors = [(who, plain(pool)) for who, pool in pools if isinstance(pool, torch.Tensor)]
            yield from _rows(scene, name, *pair, tensors)


def _recurrent(scene: _Scene, known: Mapping[tuple[int, ...], StateSnapshot]) -> Iterator[Violation]:
    """State per layer and head, each on a scale of its own; a wrong one is looked for among all states `known`."""
    pair = _both(scene, "recurrent_state")
    if isinstance(pair, Violation):
        yield pair
    elif pair is not None and pair[1].ndim < 3:
        raise Misuse(f"fresh.recurrent_state: must be [layers, heads, ...], not {list(pair[1].shape)}")
    elif pair is not None:
        got, right = pair
        for layer in range(right.shape[0]):
            errors = row_errors(got[layer], right[layer])
            for head in torch.nonzero(~(errors <= scene.tolerance)).flatten().tolist():
                right_state, got_state = show_difference(right[layer, head], got[layer, head])
                yield blame(
                    "STATE-1",
                    scene.key,
                    f"recurrent_state, layer {layer}, head {head}: it is not that of a fresh prefill",
                    step=scene.step,
                    position=len(scene.got.token_ids) - 2,
                    row=head,
                    expected=right_state,
                    got=got_state,
                    origin=_whose_state(scene, known, got[layer, head], (layer, head)),
                )


def _whose_state(
    scene: _Scene, known: Mapping[tuple[int, ...], StateSnapshot], got: torch.Tensor, place: tuple[int, int]
) -> str | None:
    """The tokens after which a fresh engine has this state, if it was ever asked for them; own ones first."""
    if not got.isfinite().all():
        return "NaN or infinite: unwritten or freed memory"
    if not got.any():
        return "zero: the state before the first token"
    mine = tuple(scene.got.token_ids)
    for tokens in sorted(known, key=lambda tokens: mine[: len(tokens)] != tokens):
        state = known[tokens].recurrent_state
        if state is not None and matching_rows(got, plain(state)[place][None], scene.tolerance):
            whose = "the same request" if mine[: len(tokens)] == tokens else f"another one, which begins {tokens[:4]},"
            return f"this is the state of {whose} after {len(tokens) - 1} tokens (expected: {len(mine) - 1})"
    return None


def _rows(
    scene: _Scene, label: str, got: torch.Tensor, right: torch.Tensor, pools: Sequence[tuple[str, torch.Tensor]]
) -> Iterator[Violation]:
    errors = row_errors(got, right)
    limit = 0.0 if label == "draft_input_ids" else scene.tolerance
    wrong = torch.nonzero(~(errors <= limit)).flatten().tolist()
    if not wrong:
        return
    row = wrong[0]
    more = f" (and {len(wrong) - 1} more rows)" if len(wrong) > 1 else ""
    right_row, got_row = show_difference(right[row], got[row])
    yield blame(
        "STATE-1",
        scene.key,
        f"{label}: the row is not that of a fresh prefill{more}",
        step=scene.step,
        position=row,
        row=row,
        expected=right_row,
        got=got_row,
        origin=_origin(got[row], pools, limit),
    )


def _origin(row: torch.Tensor, pools: Sequence[tuple[str, torch.Tensor]], tolerance: float) -> str | None:
    if torch.isnan(row).any():
        return "NaN: unwritten or freed memory"
    for who, pool in pools:
        matches = matching_rows(row, pool, tolerance)
        if matches:
            return f"this is row {matches[0]} of {who}"
    return None


@invariant(
    "STATE-2",
    statement="auxiliary hidden states are collected on every path (plain, logprobs wanted, pruned prefill, chunked)",
    needs={"aux"},
)
def state_2(run: Run) -> list[Violation]:
    """Every step that ran the target reports (collected, expected), and both are equal."""
    out = []
    for step in run.steps:
        rows = step.aux_hidden_rows
        if rows is None:
            if step.target_forwards > 0:
                message = "the target ran, but no auxiliary hidden states were collected"
                out.append(
                    Violation(invariant="STATE-2", step=step.step, message=message, expected="rows", got="nothing")
                )
        elif not is_ids(rows) or len(rows) != 2:
            message = "aux_hidden_rows is not (rows collected, rows expected)"
            out.append(Violation(invariant="STATE-2", step=step.step, message=message, got=repr(rows)))
        elif rows[0] != rows[1]:
            message = f"rows of auxiliary hidden states are missing or too many in a step of kind {step.kind!r}"
            out.append(Violation(invariant="STATE-2", step=step.step, message=message, expected=rows[1], got=rows[0]))
    return out
