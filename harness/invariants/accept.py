"""ACCEPT: acceptance is exactly what the drafter deserves. Verification hides a broken drafter from other checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from harness.contract import Completion, Run
from harness.invariants.base import Key, Misuse, Violation, blame, invariant
from harness.invariants.trace import VerifyRow, counted_rows, verify_rows
from harness.invariants.wellformed import sound_completions, sound_deltas


def _steps(run: Run, invariant_id: str) -> dict[Key, list[VerifyRow]]:
    """Verify rows by key, only to name the engine step of an accept length; empty for a black box."""
    return counted_rows(verify_rows(invariant_id, run)[0])


def _step(rows: Sequence[VerifyRow], entry: int) -> int | None:
    return rows[entry].step if entry < len(rows) else None


def _missing(invariant_id: str, run: Run, key: Key) -> list[Violation]:
    aborted = run.request(key[0]).abort_step is not None
    return [] if aborted else [blame(invariant_id, key, "accept_lens are missing", got="nothing")]


@invariant(
    "ACCEPT-1",
    statement="accept lengths equal the closed form, per request and step",
    needs={"accept_lens", "known_answer"},
)
def accept_1(
    run: Run, expected: Mapping[str, Sequence[int]], drafted: Mapping[str, Sequence[int]] | None = None
) -> list[Violation]:
    """`expected` gives the accept lengths by request id (or `id#index` for one of n samples), the last one uncut.

    `drafted` gives the number of drafts of each step likewise, for drafters that may have less than k to say; an engine
    that does not report them is not asked. An aborted request is compared as far as it got.
    """
    found, out = sound_completions("ACCEPT-1", run)
    steps = _steps(run, "ACCEPT-1")
    for key, done in found.items():
        if done.accept_lens is None:
            out += _missing("ACCEPT-1", run, key)
            continue
        rows = steps.get(key, [])
        for name, lens, right in (
            ("accept length", done.accept_lens, _wanted("expected", expected, key)),
            ("number of drafts", done.draft_lens, () if drafted is None else _wanted("drafted", drafted, key)),
        ):
            if lens is None or (name == "number of drafts" and drafted is None):
                continue
            whole = right[: len(lens)] if done.finish_reason == "abort" else right
            out += _first_wrong("ACCEPT-1", key, lens, whole, rows, "the closed form", name)
    return out


def _wanted(argument: str, lens: Mapping[str, Sequence[int]], key: Key) -> Sequence[int]:
    for name in (f"{key[0]}#{key[1]}", key[0]):
        if name in lens:
            return lens[name]
    raise Misuse(f"{argument} has no entry for request {key[0]!r}; give one for every request")


def _first_wrong(
    invariant_id: str,
    key: Key,
    got: Sequence[int],
    right: Sequence[int],
    rows: Sequence[VerifyRow],
    what: str,
    name: str = "accept length",
) -> list[Violation]:
    for entry, (a, b) in enumerate(zip(got, right, strict=False)):
        if a != b:
            message = f"{name} of verify step {entry} differs from {what}"
            step, origin = _step(rows, entry), f"all of them: {tuple(got)}, expected {tuple(right)}"
            return [blame(invariant_id, key, message, step=step, row=entry, expected=b, got=a, origin=origin)]
    if len(got) == len(right):
        return []
    message = f"number of verify steps differs from {what}"
    return [blame(invariant_id, key, message, row=min(len(got), len(right)), expected=len(right), got=len(got))]


@invariant(
    "ACCEPT-2",
    statement="drafter == target accepts k every time; acceptance on a replayed prompt does not drift with uptime, "
    "prefix hits, preemption, chunk borders or k = 0 steps",
    needs={"accept_lens"},
)
def accept_2(run: Run, full: bool) -> list[Violation]:
    """`full`: the drafter is the target, so every verify step accepts all k drafts (entries are not cut by a finish).

    With `full=False` the drafter never agrees, so every step accepts the bonus token alone. Fewer than k drafts are
    excused only where k more tokens would pass the context length, and for a last token that none are claimed for.
    """
    if run.setup.drafter is None:
        raise Misuse("setup.drafter=None: must name a drafter, or there is no acceptance to judge")
    k = run.setup.drafter.num_steps
    found, out = sound_completions("ACCEPT-2", run)
    steps = _steps(run, "ACCEPT-2")
    for key, done in found.items():
        if done.accept_lens is None:
            out += _missing("ACCEPT-2", run, key)
            continue
        fault = partial(blame, "ACCEPT-2", key)
        for entry, accept_len in enumerate(done.accept_lens):
            right = 1 + (_drafts_due(run, done, entry, k) if full else 0)
            if accept_len != right:
                message = "a perfect drafter was not accepted whole" if full else "a hopeless drafter was accepted"
                step = _step(steps.get(key, []), entry)
                out.append(fault(message, step=step, row=entry, expected=right, got=accept_len))
    return out


def _drafts_due(run: Run, done: Completion, entry: int, k: int) -> int:
    """k, or what the engine drafted where k more tokens would not have fitted into the context."""
    claims = run.capabilities
    given = (0 if claims.drafts_with_prefill else 1) + sum((done.accept_lens or ())[:entry])
    if not claims.drafts_for_last and given + 1 == run.request(done.request_id).sampling.max_new_tokens:
        return 0
    cramped = len(done.prompt_token_ids) + given + k + 1 > run.setup.context_length
    if cramped and done.draft_lens is not None and entry < len(done.draft_lens):
        return min(done.draft_lens[entry], k)
    return k


@invariant("ACCEPT-2", needs={"runs"})
def accept_2_drift(runs: Sequence[Run], by_position: bool = False) -> list[Violation]:
    """Runs of the same greedy requests on one engine, in order of time: acceptance stays what it was in the first.

    By default the accept lengths must be the same lists. `by_position` compares them per start of the drafted block,
    for runs whose blocks start elsewhere (preempted, other chunk borders, k = 0 steps in between); it needs traces with
    deltas, and compares steps that drafted equally many tokens.
    """
    if len(runs) < 2:
        raise Misuse(f"runs={len(runs)}: must be at least 2 to show a drift")
    first, _ = sound_completions("ACCEPT-2", runs[0])
    out: list[Violation] = []
    common, compared = 0, 0
    for number, run in enumerate(runs):
        found, flaws = sound_completions("ACCEPT-2", run, arm=f"run {number}: ")
        out += flaws
        if by_position:
            out += verify_rows("ACCEPT-2", run)[1] + sound_deltas("ACCEPT-2", run)[1]
        for key in [key for key in found if number and key in first]:
            common += 1
            what = f"the first of {len(runs)} runs (this is run {number})"
            drifted, places = (_moved if by_position else _changed)(runs[0], run, key, what)
            out += drifted
            compared += places
    if common == 0 and not out:
        raise Misuse("runs: the first and the later ones have no request in common; replay the same requests")
    if compared == 0 and not out:
        message = "no block of a later run begins where one of the first run does: nothing tells whether it drifted"
        out.append(Violation(invariant="ACCEPT-2", message=message))
    return out


Drifted = tuple[list[Violation], int]
"""Violations, and how many steps were compared."""


def _changed(first: Run, later: Run, key: Key, what: str) -> Drifted:
    right, got = first.of(*key).accept_lens, later.of(*key).accept_lens
    if right is None or got is None:
        return [blame("ACCEPT-2", key, f"accept_lens are missing here or in {what}", got="nothing")], 0
    rows = _steps(later, "ACCEPT-2").get(key, [])
    return _first_wrong("ACCEPT-2", key, got, right, rows, what), 1


Starts = dict[int, VerifyRow]
"""Output index at which a drafted block begins -> the verify step."""


def _starts(run: Run, key: Key) -> Starts:
    """Where each block of a request begins: the tokens that it had been given before."""
    parts, _ = sound_deltas("ACCEPT-2", run)
    starts, given, waiting = {}, 0, list(_steps(run, "ACCEPT-2").get(key, []))
    for step, delta in parts.get(key, []):
        sent = tuple(delta.token_ids)
        if waiting and sent and waiting[0].step <= step.step and waiting[0].block[: len(sent)] == sent:
            starts[given] = waiting.pop(0)
        given += len(sent)
    return starts


def _moved(first: Run, later: Run, key: Key, what: str) -> Drifted:
    rights, gots = _starts(first, key), _starts(later, key)
    places = sorted(rights.keys() & gots.keys())
    out = []
    for start in places:
        right, got = rights[start], gots[start]
        if right.num_drafts == got.num_drafts and right.accept_len != got.accept_len:
            message = f"acceptance of the block at output token {start} differs from {what}"
            out.append(blame("ACCEPT-2", key, message, step=got.step, expected=right.accept_len, got=got.accept_len))
    return out, len(places)
