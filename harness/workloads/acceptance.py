"""Accept lengths that a drafter deserves, under the way in which an engine says that it drafts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import NamedTuple

from harness.contract import Capabilities, Completion, Request, Run, SamplingParams
from harness.known_answer import Drafter


class Step(NamedTuple):
    """One verify step: how many drafts it had, and how many tokens it emitted."""

    drafted: int
    accept_len: int


def deserved(run: Run, drafter: Drafter, max_tokens: int | None = None) -> dict[str, tuple[int, ...]]:
    """Accept lengths by request id of a run of bare greedy requests that reach their cap, from the weights alone.

    `max_tokens`: how many positions the drafter has, where that is fewer than the engine's context length.
    """
    steps = deserved_steps(run, drafter, max_tokens)
    return {name: tuple(step.accept_len for step in its) for name, its in steps.items()}


def deserved_drafts(run: Run, drafter: Drafter, max_tokens: int | None = None) -> dict[str, tuple[int, ...]]:
    """The numbers of drafts of the same steps, for a chain."""
    return {n: tuple(step.drafted for step in steps) for n, steps in deserved_steps(run, drafter, max_tokens).items()}


def deserved_steps(run: Run, drafter: Drafter, max_tokens: int | None = None) -> dict[str, tuple[Step, ...]]:
    claims, context = run.capabilities, run.setup.context_length
    if claims.drafts_within_context:
        max_tokens = context if max_tokens is None else min(max_tokens, context)
    return {
        request.request_id: verify_steps(
            drafter,
            request.prompt_token_ids,
            request.sampling.max_new_tokens,
            draft_lengths(run, request),
            claims,
            max_tokens,
        )
        for request in run.requests
    }


def draft_lengths(run: Run, request: Request) -> Iterator[int]:
    """The most that may be drafted for each verify step of a request, in turn.

    Where the number of steps changes, the traces tell when each draft was made. Such a run must not preempt: what is
    drafted for a resumed request is drafted twice.
    """
    own = request.num_speculative_tokens
    if run.actions:
        assert not any(step.preempted for step in run.steps)
        owner = f"{request.request_id}#0"
        traces = [(step.step, step.propose) for step in run.steps if step.propose is not None]
        made = [
            step
            for step, propose in traces
            if (owner, False) in zip(propose.request_ids, propose.discarded, strict=True)
        ]
        # An engine that ended too soon made fewer drafts than it should have.
        lengths: Iterable[int] = chain(map(run.num_steps_at, made), repeat(run.num_steps_at(len(run.steps))))
    else:
        lengths = repeat(run.num_steps_at(0))
    return (length if own is None else min(length, own) for length in lengths)


def verify_steps(
    drafter: Drafter,
    prompt: tuple[int, ...],
    max_new_tokens: int,
    lengths: Iterator[int],
    claims: Capabilities,
    max_tokens: int | None = None,
) -> tuple[Step, ...]:
    """Every verify step, the next of which drafts `next(lengths)` tokens at most and none behind `max_tokens` tokens;
    see `Capabilities` for the ways in which engines differ."""
    tokens = prompt if claims.drafts_with_prefill else (*prompt, drafter.target.next_token(prompt))
    steps: list[Step] = []
    while (left := len(prompt) + max_new_tokens - len(tokens)) > 0:
        k = min(next(lengths), left - 1) if claims.drafts_within_cap else next(lengths)
        k = k if left > 1 or claims.drafts_for_last else 0
        if max_tokens is not None:
            k = min(k, max(max_tokens - len(tokens), 0))
        steps.append(verify_step(drafter, tokens, k))
        tokens += drafter.target.greedy(tokens, steps[-1].accept_len)
    return tuple(steps)


def verify_step(drafter: Drafter, tokens: tuple[int, ...], k: int) -> Step:
    """The step that verifies up to k drafts behind the committed `tokens`."""
    drafts = drafter.draft(tokens, k) if k else ()
    right = drafter.target.greedy(tokens, len(drafts))
    accepted = next((i for i, draft in enumerate(drafts) if draft != right[i]), len(drafts))
    return Step(len(drafts), accepted + 1)


def earned(done: Completion, drafter: Drafter, k: int, claims: Capabilities) -> tuple[int, ...]:
    """Accept lengths of a bare greedy completion from the weights and from how much was drafted in each step.

    For runs in which that changes on the way. `k` is the depth of a full draft: a tree has more drafts than that.
    """
    target, tokens = drafter.target, done.prompt_token_ids
    if not claims.drafts_with_prefill:
        tokens = (*tokens, target.next_token(tokens))
    lens: list[int] = []
    for drafted in done.draft_lens or ():
        lens.append(verify_step(drafter, tokens, min(drafted, k)).accept_len)
        tokens += target.greedy(tokens, lens[-1])
    return tuple(lens)


ALTERING = (
    *("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("bad_words", "allowed_token_ids", "json_schema", "regex", "min_new_tokens"),
)
"""Sampling fields that change what the target would say by itself."""


def is_bare(request: Request, claims: Capabilities) -> bool:
    """Whether the request's tokens are those of the target alone."""
    plain = SamplingParams()
    banned = request.sampling.ignore_eos and claims.ignore_eos == "ban"
    return not banned and all(getattr(request.sampling, name) == getattr(plain, name) for name in ALTERING)
