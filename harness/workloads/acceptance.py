"""Accept lengths that a drafter deserves, under the way in which an engine says that it drafts."""

from __future__ import annotations

from harness.contract import Capabilities, Run
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
