"""KV: every page has exactly one state after every step, and nothing freed is ever read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import torch

from harness.contract import PageLedger, Run, StepTrace
from harness.invariants.base import Violation, blame, invariant
from harness.invariants.trace import is_known, key_of
from harness.invariants.wellformed import is_ids, sound_completions, sound_deltas

_STATEMENT = (
    "slots are conserved after every step: free + held = total, nothing held twice, all free at idle; "
    "nothing freed is read (freed and unwritten memory is poisoned)"
)


@invariant("KV-1", statement=_STATEMENT, needs={"pages"})
def kv_1(run: Run) -> list[Violation]:
    """Pages after every step; cached pages (prefix cache, held by nobody) count beside the free ones."""
    out: list[Violation] = []
    total: int | None = None
    last: tuple[StepTrace, PageLedger] | None = None
    for step in run.steps:
        ledger = step.pages
        if ledger is None:
            out.append(Violation(invariant="KV-1", step=step.step, message="no page ledger after this step"))
            continue
        flaw = _flaw(ledger)
        if flaw is not None:
            out.append(Violation(invariant="KV-1", step=step.step, message=flaw, got=repr(ledger)))
            continue
        total = ledger.total if total is None else total
        if ledger.total != total:
            message = "the number of pages changed"
            out.append(Violation(invariant="KV-1", step=step.step, message=message, expected=total, got=ledger.total))
        out += [*_ids(step, ledger), *_overlaps(run, step, ledger), *_conserved(step, ledger)]
        last = step, ledger
    if run.idle and last is not None:
        out += _idle(run, *last)
    return out + kv_1_poison(run)


def _flaw(ledger: PageLedger) -> str | None:
    lists = [ledger.free, ledger.cached, ledger.shared, *ledger.held.values()]
    if not isinstance(ledger.total, int) or not all(is_ids(pages) for pages in lists):
        return "the page ledger does not hold integers"
    return None


def _ids(step: StepTrace, ledger: PageLedger) -> Iterator[Violation]:
    """Page ids in range, and none twice in one list."""
    named = {"free": ledger.free, "cached": ledger.cached, "shared": ledger.shared}
    named |= {f"held by {owner}": pages for owner, pages in ledger.held.items()}
    for name, pages in named.items():
        for page, times in sorted(Counter(pages).items()):
            fault = partial(Violation, invariant="KV-1", step=step.step, row=page)
            if not 0 <= page < ledger.total:
                yield fault(message=f"{name}: page id out of range", expected=f"[0, {ledger.total})", got=page)
            elif times > 1:
                yield fault(message=f"{name}: page {page} is listed {times} times", expected=1, got=times)


def _overlaps(run: Run, step: StepTrace, ledger: PageLedger) -> Iterator[Violation]:
    """No page in two states, and none held by two owners unless it is shared."""
    holders: dict[int, list[str]] = {}
    for owner, pages in ledger.held.items():
        if not is_known(run, key_of(run, owner)):
            message = f"pages are held by {owner!r}, which is no request of this run"
            yield Violation(invariant="KV-1", step=step.step, message=message, got=tuple(pages))
        for page in dict.fromkeys(pages):
            holders.setdefault(page, []).append(owner)
    for page, owners in sorted(holders.items()):
        fault = partial(blame, "KV-1", key_of(run, owners[0]), step=step.step, row=page)
        if len(owners) > 1 and page not in ledger.shared:
            yield fault(f"page {page} is held twice, and is not shared", expected="one owner", got=owners)
        for name, pages in (("free", ledger.free), ("cached", ledger.cached)):
            if page in pages:
                yield fault(f"page {page} is held and {name} at once", expected="one state", got=owners)
    for page in sorted(set(ledger.free) & set(ledger.cached)):
        message = f"page {page} is free and cached at once"
        yield Violation(invariant="KV-1", step=step.step, row=page, message=message)
    for page in sorted(set(ledger.shared) - set(holders) - set(ledger.cached)):
        message = f"page {page} is shared, though nobody holds or caches it"
        yield Violation(invariant="KV-1", step=step.step, row=page, message=message)


def _conserved(step: StepTrace, ledger: PageLedger) -> Iterator[Violation]:
    known = {*ledger.free, *ledger.cached, *(page for pages in ledger.held.values() for page in pages)}
    got = sum(0 <= page < ledger.total for page in known)
    if got < ledger.total:
        lost = list(islice((page for page in range(ledger.total) if page not in known), 16))
        message = f"{ledger.total - got} pages leaked: neither free, nor cached, nor held by anyone"
        yield Violation(
            invariant="KV-1",
            step=step.step,
            row=lost[0],
            message=message,
            expected=ledger.total,
            got=got,
            origin=f"pages {lost}",
        )


def _idle(run: Run, step: StepTrace, ledger: PageLedger) -> Iterator[Violation]:
    for owner, pages in ledger.held.items():
        if pages:
            message = "pages are still held when the engine is idle"
            yield blame("KV-1", key_of(run, owner), message, step=step.step, expected="none", got=tuple(pages))


@invariant("KV-1", needs={"completion"})
def kv_1_poison(run: Run) -> list[Violation]:
    """NaN in a result: memory that was freed or never written was read (such memory is poisoned with NaN)."""
    found, out = sound_completions("KV-1", run)
    deltas, flaws = sound_deltas("KV-1", run)
    out += flaws
    for key, done in found.items():
        if done.hidden_states is not None:
            hidden = done.hidden_states
            out += _poisoned_rows(partial(blame, "KV-1", key), [*hidden.prefill, *hidden.decode], "completion")
        for start, rows in ((0, done.prompt_logprobs or ()), (len(done.prompt_token_ids), done.logprobs or ())):
            for row, entry in enumerate(rows):
                if entry is not None and any(math.isnan(x) for x in (entry.logprob, *(x for _, x in entry.top))):
                    message = "a logprob is NaN: freed or unwritten memory was read"
                    out.append(blame("KV-1", key, message, position=start + row, row=row, got=repr(entry)))
    for key, parts in deltas.items():
        for step, delta in parts:
            blocks = [] if delta.prefill_hidden is None else [delta.prefill_hidden]
            rows_of_step = [*blocks, *delta.decode_hidden]
            out += _poisoned_rows(partial(blame, "KV-1", key, step=step.step), rows_of_step, "step")
    return out


def _poisoned_rows(fault: partial[Violation], rows: Sequence[torch.Tensor], whence: str) -> Iterator[Violation]:
    for row, values in enumerate(rows):
        if values.is_floating_point() and bool(torch.isnan(values).any()):
            message = f"a hidden row of the {whence} is NaN: freed or unwritten memory was read"
            yield fault(message, row=row, expected="numbers", got="NaN")
