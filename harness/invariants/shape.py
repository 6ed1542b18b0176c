"""SHAPE: what drafter and verifier hand over has the agreed shape, and every slot holds an id or the placeholder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from harness.contract import PLACEHOLDER, ProposeTrace, Run, StepTrace, VerifyTrace
from harness.invariants.base import Violation, blame, invariant
from harness.invariants.checkpoint import vocab_size as stored_vocab_size
from harness.invariants.trace import is_id_matrix, key_of, rows_of, verify_flaw
from harness.invariants.wellformed import is_int, sound_completions, sound_deltas

INTEGERS = ("int32", "int64")


@invariant(
    "SHAPE-1",
    statement="`propose` returns exactly `[N, k]` integers (`[N, 1]` for k = 1, `[N, 0]` for k = 0) whatever the width "
    "1..k+1 of the sampled tokens it was given, and for ragged, discarded and empty rows",
    needs={"propose"},
)
def shape_1(run: Run) -> list[Violation]:
    """`facts` is judged (what `propose` really returned) as well as the copy, which later checks read.

    Where the setup pads batches, what was returned may have the rows of the padded batch instead; the copy may not.
    """
    out = []
    for step in run.steps:
        if step.propose is not None:
            out += [
                Violation(invariant="SHAPE-1", step=step.step, message=message, expected=right, got=got)
                for message, right, got in _propose_flaws(run, step.propose, _most_drafts(run, step.step))
            ]
    return out


def _most_drafts(run: Run, step: int) -> int | None:
    """What the drafting steps that are set for an engine step can give; None without a drafter."""
    drafter = run.setup.drafter
    if drafter is None:
        return None
    num_steps = run.num_steps_at(step)
    nodes = drafter.topk + (num_steps - 1) * drafter.topk**2 if num_steps else 0
    return min(drafter.num_draft_tokens - 1, nodes)


def padded(run: Run, rows: int) -> int:
    """The rows that a batch is padded to: its bucket, or none."""
    return min((bucket for bucket in run.setup.batch_buckets if bucket >= rows), default=rows)


def _propose_flaws(run: Run, propose: ProposeTrace, most: int | None) -> list[tuple[str, object, object]]:
    rows, k, width = len(propose.request_ids), propose.k, propose.sampled_width
    if not is_int(k) or k < 0 or (most is not None and k > most):
        return [("k lies outside what the setup, or set_num_steps, allows", f"0..{most}", k)]
    # What was sampled follows from the drafts of the step before, which may have been more.
    widest = k + 1 if run.setup.drafter is None else run.setup.drafter.num_draft_tokens
    out: list[tuple[str, object, object]] = []
    given = f"propose given {rows} rows of width {width}, k = {k}"
    if tuple(propose.facts.shape) not in ((rows, k), (padded(run, rows), k)):
        out.append((f"{given}: wrong shape returned", (rows, k), tuple(propose.facts.shape)))
    if propose.facts.dtype not in INTEGERS:
        out.append((f"{given}: wrong dtype returned", " or ".join(INTEGERS), propose.facts.dtype))
    if not is_id_matrix(propose.token_ids, rows) or propose.token_ids.shape[1] != k:
        got = getattr(propose.token_ids, "shape", propose.token_ids)
        out.append((f"{given}: the drafts are not integers of the right shape", (rows, k), repr(got)))
    if not is_int(width) or not 1 <= width <= widest:
        out.append((f"{given}: width of the sampled tokens lies outside 1..k+1", f"1..{widest}", width))
    if len(propose.discarded) != rows:
        out.append((f"{given}: not one discarded mark per row", rows, len(propose.discarded)))
    return out


@invariant(
    "SHAPE-2",
    statement="accept length lies in 1..k+1 at every consumer; no id outside `[0, V)` reaches an embedding; "
    "unused slots hold the placeholder",
    needs={"completion"},
)
def shape_2(run: Run, vocab_size: int | None = None) -> list[Violation]:
    """`vocab_size` (V) is read from the target's config.json when not given; unknown, only 0 bounds the ids."""
    size = stored_vocab_size(run) if vocab_size is None else vocab_size
    out = _completions(run, size)
    for step in run.steps:
        out += _embedded(step, size)
        if step.verify is not None:
            out += _verify(run, step, step.verify, size)
        if step.propose is not None and is_id_matrix(step.propose.token_ids, len(step.propose.request_ids)):
            out += _drafts(run, step, step.propose.request_ids, step.propose.token_ids.tolist(), size, "propose")
    return out


def _outside(token_ids: Sequence[int], size: int | None, *, holes: bool = False) -> list[int]:
    """Rows of a list of ids that lie outside [0, V) and are not (allowed) placeholders."""
    top = float("inf") if size is None else size
    return [row for row, token_id in enumerate(token_ids) if not (0 <= token_id < top or (holes and token_id == -1))]


def _bounds(size: int | None) -> str:
    return f"[0, {'V' if size is None else size})"


def _completions(run: Run, size: int | None) -> list[Violation]:
    found, out = sound_completions("SHAPE-2", run)
    deltas, flaws = sound_deltas("SHAPE-2", run)
    out += flaws
    longest = run.setup.drafter.num_steps + 1 if run.setup.drafter is not None else 1
    for key, done in found.items():
        fault = partial(blame, "SHAPE-2", key)
        for row in _outside(done.token_ids, size):
            position = len(done.prompt_token_ids) + row
            message = "completion holds an id outside the vocabulary"
            got = done.token_ids[row]
            out.append(fault(message, position=position, row=row, expected=_bounds(size), got=got))
        for row, accept_len in enumerate(done.accept_lens or ()):
            if not 1 <= accept_len <= longest:
                message = "completion.accept_lens lies outside 1..k+1"
                out.append(fault(message, row=row, expected=f"1..{longest}", got=accept_len))
        for step, delta in deltas.get(key, []):
            for row in _outside(delta.token_ids, size):
                message, got = "a step delivered an id outside the vocabulary", delta.token_ids[row]
                out.append(fault(message, step=step.step, row=row, expected=_bounds(size), got=got))
    return out


def _embedded(step: StepTrace, size: int | None) -> list[Violation]:
    if step.embedded is None or not _outside(step.embedded, size):
        return []
    message = "an id outside the vocabulary reached an embedding"
    return [Violation(invariant="SHAPE-2", step=step.step, message=message, expected=_bounds(size), got=step.embedded)]


def _drafts(
    run: Run, step: StepTrace, owners: Sequence[str], drafts: Sequence[Sequence[int]], size: int | None, who: str
) -> list[Violation]:
    """Ids in range; in a chain nothing follows a placeholder."""
    out = []
    chain = run.setup.drafter is None or run.setup.drafter.topk == 1
    for row, (owner, token_ids) in enumerate(zip(owners, drafts, strict=True)):
        fault = partial(blame, "SHAPE-2", key_of(run, owner), step=step.step, row=row, got=tuple(token_ids))
        if _outside(token_ids, size, holes=True):
            right = f"{_bounds(size)} or {PLACEHOLDER}"
            out.append(fault(f"{who}: a draft slot holds neither an id nor the placeholder", expected=right))
        first_hole = next((slot for slot, token_id in enumerate(token_ids) if token_id == PLACEHOLDER), None)
        if chain and first_hole is not None and set(token_ids[first_hole:]) != {PLACEHOLDER}:
            out.append(fault(f"{who}: a draft follows an unused slot of the chain", expected="placeholders only"))
    return out


def _verify(run: Run, step: StepTrace, verify: VerifyTrace, size: int | None) -> list[Violation]:
    flaw = verify_flaw(verify)
    if flaw is not None:
        return [Violation(invariant="SHAPE-2", step=step.step, message=f"unreadable verify trace: {flaw}")]
    out = _drafts(run, step, verify.request_ids, verify.draft_token_ids.tolist(), size, "verify")
    width = verify.num_draft_tokens - 1
    if verify.draft_token_ids.shape[1] != width:
        message, got = "verify: drafts are not num_draft_tokens - 1 wide", verify.draft_token_ids.shape[1]
        out.append(Violation(invariant="SHAPE-2", step=step.step, message=message, expected=width, got=got))
    longest = min(width, run.setup.drafter.num_steps if run.setup.drafter is not None else width) + 1
    for row in rows_of(run, step):
        fault = partial(blame, "SHAPE-2", row.key, step=step.step, row=row.row)
        most = min(longest, row.num_drafts + 1)
        if not 1 <= row.accept_len <= most:
            message = "accept length lies outside 1..drafts + 1"
            out.append(fault(message, expected=f"1..{most}", got=row.accept_len))
        elif len(row.emitted) < row.accept_len or _outside(row.block, size):
            message = "the accepted block is not made of ids"
            out.append(fault(message, expected=f"{row.accept_len} ids in {_bounds(size)}", got=row.emitted))
        elif any(token_id != PLACEHOLDER for token_id in row.emitted[row.accept_len :]):
            message = "a slot after the accept length does not hold the placeholder"
            out.append(fault(message, expected=PLACEHOLDER, got=row.emitted))
    return out
