"""A small world with known answers, fabricated runs in it, and ways to break one thing at a time.

Vocabulary of 16; after token t the target says `follower(t)` (p = 0.7), `follower(t) + 1` (p = 0.2), and shares the
rest equally. A hidden row is `[one-hot token | position | running sum]`, so no two places of a batch have the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from harness.contract import (
    PLACEHOLDER,
    Capabilities,
    Completion,
    Delta,
    DrafterSetup,
    EngineSetup,
    HiddenStates,
    LogprobRow,
    PageLedger,
    ProposeTrace,
    Request,
    Run,
    SamplingParams,
    SpecCounters,
    StateSnapshot,
    StepTrace,
    TensorFacts,
    Usage,
    VerifyTrace,
)
from harness.invariants import Violation

VOCAB, WIDTH, K, PAGE, PAGES = 16, 18, 3, 4, 24


def follower(token_id: int) -> int:
    return (5 * token_id + 3) % VOCAB


def law(prefix: tuple[int, ...]) -> torch.Tensor:
    probabilities = torch.full((VOCAB,), 0.1 / (VOCAB - 2), dtype=torch.float64)
    best = follower(prefix[-1])
    probabilities[best] = 0.7
    probabilities[(best + 1) % VOCAB] = 0.2
    return probabilities.log()


def rows(tokens: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor(tokens)
    places = torch.stack([torch.arange(len(tokens)), ids.cumsum(0)], dim=1)
    return torch.cat([torch.nn.functional.one_hot(ids, VOCAB), places], dim=1).float()


def name_row(row: torch.Tensor) -> str:
    return f"token {int(row[:VOCAB].argmax())} at {round(float(row[VOCAB]))}, sum {round(float(row[VOCAB + 1]))}"


def text_of(tokens: tuple[int, ...]) -> str:
    return "".join("abcdefghijklmnop"[token_id] for token_id in tokens)


def fresh(tokens: tuple[int, ...]) -> StateSnapshot:
    """KV of two layers: (position, token) plus 100 * layer + 50 * (V rather than K); the drafter has one layer. The
    state of one recurrent layer sums up the first layer's keys in one head, the values in another."""
    count = len(tokens) - 1
    base = torch.tensor([[position, tokens[position]] for position in range(count)], dtype=torch.float32)
    kv = torch.stack([torch.stack([base + 100 * layer + 50 * half for half in (0, 1)], 1) for layer in (0, 1)], 1)
    kv = kv.reshape(count, 2, 2, 1, 2)
    return StateSnapshot(
        owner="fresh",
        token_ids=tokens,
        target_kv=kv,
        draft_kv=kv[:, :1] + 1000,
        draft_input_ids=torch.tensor(tokens[1:]),
        draft_features=rows(tokens)[:-1],
        recurrent_state=torch.stack([kv[:, 0, 0, 0].cumsum(0)[-1], kv[:, 0, 1, 0].cumsum(0)[-1] % 97])[None],
    )


def logprob_row(prefix: tuple[int, ...], token_id: int, top: int) -> LogprobRow:
    return _logprob_row(prefix[-1], token_id, top)


@cache
def _logprob_row(last: int, token_id: int, top: int) -> LogprobRow:
    scores = law((last,))
    order = torch.sort(scores, descending=True, stable=True).indices[:top].tolist()
    rank = 1 + int((scores > scores[token_id]).sum())
    return LogprobRow(token_id, float(scores[token_id]), rank, tuple((i, float(scores[i])) for i in order))


@dataclass
class _Live:
    """A request on its way: what it has, what its drafter will do."""

    request: Request
    accepts: list[int]
    tokens: list[int]
    lens: list[int]
    done: bool = False


def request(request_id: str, prompt: Sequence[int], **sampling: Any) -> Request:
    asked: dict[str, Any] = {"max_new_tokens": 8, "logprobs": 2, "prompt_logprobs": 1} | sampling
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**asked),
        return_hidden_states=True,
    )


def two_requests() -> tuple[Request, ...]:
    return request("a", (1, 2, 3)), request("b", (4, 5, 6, 7, 8), max_new_tokens=6)


ACCEPTS = {"a": [3, 1, 4], "b": [2, 4]}
"""Accept lengths per verify step: a gets 1 + 3 + 1 + 3 (its last block is cut by one), b gets 1 + 2 + 3 (too)."""


def good_run(requests: Sequence[Request] | None = None, accepts: dict[str, list[int]] | None = None, k: int = K) -> Run:
    """Every observation of a correct speculative run of `requests`, each ended by its length cap."""
    script = ACCEPTS if accepts is None else accepts
    setup = EngineSetup(target=Path("/nowhere"), drafter=DrafterSetup.chain("scripted", k))
    live = [_Live(r, list(script[r.request_id]), [], []) for r in (requests or two_requests())]
    steps = [_extend(live)]
    while any(not item.done for item in live):
        steps.append(_decode(len(steps), live, k))
    steps.append(StepTrace(step=len(steps), kind="idle", pages=_pages([])))
    return Run(
        setup=setup,
        capabilities=Capabilities(engine="made up", version="0", drafters=frozenset(), features=frozenset()),
        requests=tuple(item.request for item in live),
        completions=tuple(_completion(item) for item in live),
        steps=tuple(steps),
        counters=_counters(live, k),
    )


def _emit(item: _Live, block: Sequence[int]) -> Delta:
    """Cut the block at the cap, and deliver it with copies of its rows."""
    sampling, prompt, before = item.request.sampling, item.request.prompt_token_ids, len(item.tokens)
    sent = tuple(block)[: sampling.max_new_tokens - before]
    item.tokens += sent
    item.done = len(item.tokens) >= sampling.max_new_tokens
    whole = (*prompt, *item.tokens)
    hidden = rows(whole[:-1])
    start = len(prompt) + before
    return Delta(
        request_id=item.request.request_id,
        index=0,
        token_ids=sent,
        prefill_hidden=hidden.clone() if before == 0 else None,
        decode_hidden=() if before == 0 else tuple(hidden[start - 1 + i].clone() for i in range(len(sent))),
        logprobs=tuple(logprob_row(whole[: start + i], sent[i], sampling.logprobs or 0) for i in range(len(sent))),
        finished=item.done,
    )


def _extend(live: Sequence[_Live]) -> StepTrace:
    deltas = tuple(_emit(item, [follower(item.request.prompt_token_ids[-1])]) for item in live)
    return StepTrace(step=0, kind="extend", deltas=deltas, embedded=(0, VOCAB - 1), **_grey(live, len(live)))


def _grey(live: Sequence[_Live], collected: int) -> dict[str, Any]:
    """Pages, snapshots, forwards and auxiliary rows after a step."""
    running = [item for item in live if not item.done]
    snapshots = []
    for item in running:
        tokens = (*item.request.prompt_token_ids, *item.tokens)
        snapshots.append(replace(fresh(tokens), owner=item.request.request_id))
    return {
        "pages": _pages(running),
        "snapshots": tuple(snapshots),
        "aux_hidden_rows": (collected, collected),
        "target_forwards": 1,
    }


def _pages(running: Sequence[_Live]) -> PageLedger:
    """Pages in order of the batch, page 0 cached from an earlier prompt."""
    held, start = {}, 1
    for item in running:
        count = -(-(len(item.request.prompt_token_ids) + len(item.tokens)) // PAGE)
        held[f"{item.request.request_id}#0"] = tuple(range(start, start + count))
        start += count
    return PageLedger(total=PAGES, free=tuple(range(start, PAGES)), held=held, cached=(0,))


def _decode(step: int, live: Sequence[_Live], k: int) -> StepTrace:
    running = [item for item in live if not item.done]
    drafts = torch.empty(len(running), k, dtype=torch.int64)
    emitted = torch.full((len(running), k + 1), PLACEHOLDER, dtype=torch.int64)
    lens, deltas = [], []
    for row, item in enumerate(running):
        accept_len = item.accepts.pop(0)
        last, block = item.tokens[-1], []
        for _ in range(k + 1):
            last = follower(last)
            block.append(last)
        wrong = [(token_id + 1) % VOCAB for token_id in block]
        drafts[row] = torch.tensor(block[: accept_len - 1] + wrong[accept_len - 1 : k])
        emitted[row, :accept_len] = torch.tensor(block[:accept_len])
        item.lens.append(accept_len)
        lens.append(accept_len)
        deltas.append(_emit(item, block[:accept_len]))
    owners = tuple(item.request.request_id for item in running)
    sampled = torch.zeros(len(running), 1, dtype=torch.int64)
    return StepTrace(
        step=step,
        kind="decode",
        deltas=tuple(deltas),
        propose=ProposeTrace(
            request_ids=owners,
            k=k,
            sampled_width=1,
            discarded=(False,) * len(owners),
            token_ids=drafts,
            facts=TensorFacts.of(drafts),
            sampled=TensorFacts.of(sampled),
        ),
        verify=VerifyTrace(
            request_ids=owners,
            num_draft_tokens=k + 1,
            draft_token_ids=drafts,
            accept_lens=tuple(lens),
            emitted=emitted,
            discarded=(False,) * len(owners),
        ),
        embedded=(0, VOCAB - 1),
        **_grey(live, len(owners) * (k + 1)),
    )


def _completion(item: _Live) -> Completion:
    prompt, tokens, sampling = item.request.prompt_token_ids, tuple(item.tokens), item.request.sampling
    whole = (*prompt, *tokens)
    hidden = rows(whole[:-1])
    top = sampling.logprobs
    return Completion(
        request_id=item.request.request_id,
        prompt_token_ids=prompt,
        token_ids=tokens,
        finish_reason="length",
        usage=Usage(len(prompt), len(tokens)),
        text=text_of(tokens),
        logprobs=None
        if top is None
        else tuple(logprob_row(whole[: len(prompt) + i], tokens[i], top) for i in range(len(tokens))),
        prompt_logprobs=None
        if sampling.prompt_logprobs is None
        else (None, *(logprob_row(prompt[:i], prompt[i], sampling.prompt_logprobs) for i in range(1, len(prompt)))),
        hidden_states=HiddenStates(hidden[: len(prompt)].clone(), tuple(row.clone() for row in hidden[len(prompt) :]))
        if item.request.return_hidden_states
        else None,
        accept_lens=tuple(item.lens),
        draft_lens=(K,) * len(item.lens),
    )


def _counters(live: Sequence[_Live], k: int) -> SpecCounters:
    lens = [accept_len for item in live for accept_len in item.lens]
    return SpecCounters(
        num_drafts=len(lens),
        num_draft_tokens=k * len(lens),
        num_accepted_tokens=sum(lens) - len(lens),
        accepted_per_position=tuple(sum(accept_len - 1 > i for accept_len in lens) for i in range(k)),
    )


Corruption = Callable[[Run], Run]


def completion(request_id: str, /, **changes: Any) -> Corruption:
    """Replace fields of one completion; a callable value is given the completion."""

    def apply(run: Run) -> Run:
        edited = tuple(edit(done, changes) if done.request_id == request_id else done for done in run.completions)
        return replace(run, completions=edited)

    return apply


def edit(record: Any, changes: dict[str, Any]) -> Any:
    values = {name: value(record) if callable(value) else value for name, value in changes.items()}
    return replace(record, **values)


def step(number: int, part: str | None = None, /, **changes: Any) -> Corruption:
    """Replace fields of one step, or of its `part` (propose, verify, pages)."""

    def apply(run: Run) -> Run:
        steps = list(run.steps)
        old = steps[number]
        steps[number] = edit(old, changes) if part is None else edit(old, {part: edit(getattr(old, part), changes)})
        return replace(run, steps=tuple(steps))

    return apply


def delta(number: int, request_id: str, /, **changes: Any) -> Corruption:
    """Replace fields of what one step delivered to one request."""

    def apply(run: Run) -> Run:
        parts = tuple(edit(d, changes) if d.request_id == request_id else d for d in run.steps[number].deltas)
        return step(number, deltas=parts)(run)

    return apply


def snapshot(number: int, of: str, /, **changes: Any) -> Corruption:
    """Replace fields of the snapshot of one owner after one step."""

    def apply(run: Run) -> Run:
        found = tuple(edit(s, changes) if s.owner == of else s for s in run.steps[number].snapshots)
        return step(number, snapshots=found)(run)

    return apply


def both(*corruptions: Corruption) -> Corruption:
    def apply(run: Run) -> Run:
        for corruption in corruptions:
            run = corruption(run)
        return run

    return apply


def assert_red(violations: Sequence[Violation], invariant: str, says: str, **where: Any) -> None:
    """Some violation of this invariant says this and names exactly that place; no other invariant is named."""
    assert {violation.invariant for violation in violations} == {invariant}, [str(v) for v in violations]
    assert not [violation for violation in violations if "could not be judged" in violation.message]
    hits = [
        violation
        for violation in violations
        if says in violation.message and all(getattr(violation, name) == value for name, value in where.items())
    ]
    assert hits, f"wanted {says!r} at {where}, got:\n" + "\n".join(str(violation) for violation in violations)
