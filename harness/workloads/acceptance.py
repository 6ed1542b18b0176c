"""Accept lengths that a drafter deserves, under the way in which an engine says that it drafts."""

from __future__ import annotations

from harness.contract import Capabilities, Completion, Request, Run, SamplingParams
from harness.known_answer import Drafter


def deserved(run: Run, drafter: Drafter) -> dict[str, tuple[int, ...]]:
    """Accept lengths by request id of a run of bare greedy requests that reach their cap, from the weights alone."""
    assert run.setup.drafter is not None
    k, claims = run.setup.drafter.num_steps, run.capabilities
    return {
        request.request_id: accept_lens(drafter, request.prompt_token_ids, request.sampling.max_new_tokens, k, claims)
        for request in run.requests
    }


def accept_lens(
    drafter: Drafter, prompt: tuple[int, ...], max_new_tokens: int, k: int, claims: Capabilities
) -> tuple[int, ...]:
    """Correct drafts + 1 for every verify step; see `Capabilities` for the two ways in which engines differ."""
    if not claims.drafts_with_prefill and not claims.drafts_within_cap:
        return drafter.accept_lens(prompt, max_new_tokens, k)
    tokens = prompt if claims.drafts_with_prefill else (*prompt, drafter.target.next_token(prompt))
    lens: list[int] = []
    while (left := len(prompt) + max_new_tokens - len(tokens)) > 0:
        drafts = drafter.draft(tokens, min(k, left - 1) if claims.drafts_within_cap else k)
        right = drafter.target.greedy(tokens, len(drafts) + 1)
        accepted = next((i for i, draft in enumerate(drafts) if draft != right[i]), len(drafts))
        tokens += right[: accepted + 1]
        lens.append(accepted + 1)
    return tuple(lens)


def earned(done: Completion, drafter: Drafter, k: int) -> tuple[int, ...]:
    """Accept lengths of a bare greedy completion from the weights and from how much was drafted in each step.

    For runs in which that changes on the way. `k` is the depth of a full draft: a tree has more drafts than that.
    """
    target = drafter.target
    tokens = (*done.prompt_token_ids, target.next_token(done.prompt_token_ids))
    lens: list[int] = []
    for drafted in done.draft_lens or ():
        drafts = drafter.draft(tokens, min(drafted, k)) if drafted else ()
        right = target.greedy(tokens, len(drafts) + 1)
        accepted = next((i for i, draft in enumerate(drafts) if draft != right[i]), len(drafts))
        tokens += right[: accepted + 1]
        lens.append(accepted + 1)
    return tuple(lens)


ALTERING = (
    *("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("bad_words", "allowed_token_ids", "json_schema", "regex", "min_new_tokens"),
)
"""Sampling fields that change what the target would say by itself."""


def is_bare(request: Request) -> bool:
    """Whether the request's tokens are those of the target alone."""
    plain = SamplingParams()
    return all(getattr(request.sampling, name) == getattr(plain, name) for name in ALTERING)
