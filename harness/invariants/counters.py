"""COUNT-2: the engine's statistics and accept lengths must be what its own steps add up to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from harness.contract import PLACEHOLDER, Completion, Delta, Run, SpecCounters, StepTrace
from harness.invariants.base import Key, Violation, blame, invariant
from harness.invariants.trace import VerifyRow, counted_rows, verify_rows
from harness.invariants.wellformed import sound_completions, sound_deltas

_fault = partial(blame, "COUNT-2")


@invariant(
    "COUNT-2",
    statement="reported drafts, drafted, accepted and per-position counters equal a recount from the trace, "
    "and accepted + steps = emitted unless a finish cut the block",
    needs={"counters"},
)
def count_2(run: Run) -> list[Violation]:
    """The recount reads verify traces; without them, the accept_lens and draft_lens of the completions."""
    found, out = sound_completions("COUNT-2", run)
    if any(step.verify is not None for step in run.steps):
        rows, flaws = verify_rows("COUNT-2", run)
        pairs = [(row.num_drafts, row.accept_len) for row in rows if not row.discarded]
        out += flaws
    elif all(done.accept_lens is not None and done.draft_lens is not None for done in found.values()):
        lens = [(done.draft_lens or (), done.accept_lens or ()) for done in found.values()]
        pairs = [pair for drafted, accepted in lens for pair in zip(drafted, accepted, strict=False)]
    else:
        message = "counters cannot be recounted: neither verify traces nor accept_lens with draft_lens were delivered"
        return [*out, Violation(invariant="COUNT-2", message=message)]
    if not isinstance(run.counters, SpecCounters):
        return [*out, Violation(invariant="COUNT-2", message="counters are not SpecCounters", got=repr(run.counters))]
    return out + _counters(run.counters, pairs, 0 if run.setup.drafter is None else run.setup.drafter.num_steps)


def _counters(reported: SpecCounters, pairs: Sequence[tuple[int, int]], num_steps: int) -> list[Violation]:
    per_position = tuple(reported.accepted_per_position)
    width = max(len(per_position), num_steps)
    said = {
        "num_drafts": reported.num_drafts,
        "num_draft_tokens": reported.num_draft_tokens,
        "num_accepted_tokens": reported.num_accepted_tokens,
        "accepted_per_position": per_position + (0,) * (width - len(per_position)),
    }
    recount = {
        "num_drafts": sum(drafted > 0 for drafted, _ in pairs),
        "num_draft_tokens": sum(drafted for drafted, _ in pairs),
        "num_accepted_tokens": sum(accept_len - 1 for _, accept_len in pairs),
        "accepted_per_position": tuple(sum(accept_len - 1 > i for _, accept_len in pairs) for i in range(width)),
    }
    message = "counters.{} differs from a recount"
    return [
        Violation(invariant="COUNT-2", message=message.format(name), expected=recount[name], got=said[name])
        for name in recount
        if said[name] != recount[name]
    ]


@invariant("COUNT-2", needs={"completion", "accept_lens"})
def count_2_blocks(run: Run) -> list[Violation]:
    """Per request: what was accepted had been drafted, accept_lens recount it, and all of it was delivered."""
    found, out = sound_completions("COUNT-2", run)
    rows, flaws = verify_rows("COUNT-2", run)
    deltas, more_flaws = sound_deltas("COUNT-2", run)
    counted = counted_rows(rows)
    out += flaws + more_flaws
    chain = run.setup.drafter is None or run.setup.drafter.topk == 1
    for key, done in found.items():
        mine = counted.get(key, [])
        if rows:
            out += _accepted_drafts(mine, chain) + _lens(key, done, mine)
        else:
            out += _overrun(key, done, 0 if run.capabilities.drafts_with_prefill else 1)
        if rows and deltas:
            out += _matched(key, done, mine, deltas.get(key, []))
    return out


def _row_fault(row: VerifyRow, message: str, expected: object, got: object) -> Violation:
    return _fault(row.key, message, step=row.step, row=row.row, expected=expected, got=got)


def _accepted_drafts(rows: Sequence[VerifyRow], chain: bool) -> list[Violation]:
    """In a chain, emitted tokens before the bonus are the first drafts; in a tree each is among the drafts."""
    out = []
    for row in rows:
        accepted = row.emitted[: max(row.accept_len - 1, 0)]
        right = accepted == row.drafts[: len(accepted)] if chain else set(accepted) <= set(row.drafts)
        if not right:
            message = "tokens counted as accepted drafts are not the drafts of that step"
            out.append(_row_fault(row, message, row.drafts, accepted))
    return out


def _lens(key: Key, done: Completion, rows: Sequence[VerifyRow]) -> list[Violation]:
    recount = {
        "accept_lens": tuple(row.accept_len for row in rows),
        "draft_lens": tuple(row.num_drafts for row in rows),
    }
    out = []
    for name, right in recount.items():
        said = getattr(done, name)
        if said is not None and tuple(said) != right:
            message = f"completion.{name} differs from a recount of its verify steps"
            out.append(_fault(key, message, expected=right, got=tuple(said)))
    return out


def _overrun(key: Key, done: Completion, before: int) -> list[Violation]:
    """Without a trace: what the verify steps accepted must have been delivered, save what a finish cut off the last.
    `before`: tokens that came with no verify step."""
    lens = done.accept_lens
    if not lens or done.finish_reason == "abort":
        return []
    least = before + sum(lens[:-1]) + 1
    if len(done.token_ids) >= least:
        return []
    message = "accepted tokens never reached the user (more than a finish can cut off the last block)"
    return [_fault(key, message, expected=f"at least {least} tokens", got=len(done.token_ids))]


def _matched(
    key: Key, done: Completion, rows: Sequence[VerifyRow], parts: Sequence[tuple[StepTrace, Delta]]
) -> list[Violation]:
    """Match deliveries with accepted blocks in order; a delivery outside verification carries one sampled token.

    A block may be delivered in its own step or a later one (overlap scheduling).
    """
    out = []
    waiting = [row for row in rows if row.block and PLACEHOLDER not in row.block]
    for place, (step, delta) in enumerate(parts):
        sent = tuple(delta.token_ids)
        row = waiting[0] if waiting else None
        if row is not None and sent and row.step <= step.step and row.block[: len(sent)] == sent:
            waiting.pop(0)
            if len(sent) < len(row.block) and place < len(parts) - 1:
                message = "an accepted block was not delivered whole, though its request went on"
                out.append(_row_fault(row, message, row.block, sent))
        elif len(sent) > 1:
            message = "a step delivered several tokens that are no accepted block"
            right = "one sampled token" if row is None else row.block
            out.append(_fault(key, message, step=step.step, expected=right, got=sent))
    in_flight = 1 if done.finish_reason == "abort" else 0  # an abort drops the block that was on its way
    lost = waiting[: max(len(waiting) - in_flight, 0)]
    return out + [_row_fault(row, "an accepted block was never delivered", row.block, "nothing") for row in lost]
