"""Accept lengths that a drafter deserves, under the way in which an engine says that it drafts."""

from __future__ import annotations

from typing import NamedTuple

from harness.contract import Capabilities, Run
from harness.known_answer import Drafter


class Step(NamedTuple):
    """One verify step: how many drafts it had, and how many tokens it emitted."""

    drafted: int
    accept_len: int


def deserved(run: Run, drafter: Drafter) -> dict[str, tuple[int, ...]]:
    """Accept lengths by request id of a run of bare greedy requests that reach their cap, from the weights alone."""
    return {name: tuple(step.accept_len for step in steps) for name, steps in deserved_steps(run, drafter).items()}


def deserved_drafts(run: Run, drafter: Drafter) -> dict[str, tuple[int, ...]]:
    """The numbers of drafts of the same steps, for a chain."""
    return {name: tuple(step.drafted for step in steps) for name, steps in deserved_steps(run, drafter).items()}


def deserved_steps(run: Run, drafter: Drafter) -> dict[str, tuple[Step, ...]]:
    assert run.setup.drafter is not None
    k, claims = run.setup.drafter.num_steps, run.capabilities
    return {
        request.request_id: verify_steps(drafter, request.prompt_token_ids, request.sampling.max_new_tokens, k, claims)
        for request in run.requests
    }


def verify_steps(
    drafter: Drafter, prompt: tuple[int, ...], max_new_tokens: int, k: int, claims: Capabilities
) -> tuple[Step, ...]:
    """Every verify step; see `Capabilities` for the two ways in which engines differ."""
    tokens = prompt if claims.drafts_with_prefill else (*prompt, drafter.target.next_token(prompt))
    steps: list[Step] = []
    while (left := len(prompt) + max_new_tokens - len(tokens)) > 0:
        drafts = drafter.draft(tokens, min(k, left - 1) if claims.drafts_within_cap else k)
        right = drafter.target.greedy(tokens, len(drafts) + 1)
        accepted = next((i for i, draft in enumerate(drafts) if draft != right[i]), len(drafts))
        tokens += right[: accepted + 1]
        steps.append(Step(len(drafts), accepted + 1))
    return tuple(steps)
