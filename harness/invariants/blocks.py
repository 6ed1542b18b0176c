"""Which verify step, and which place of its block, a token came from: bugs live in recovered and bonus tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.contract import Completion, Run

Kind = Literal["prefill", "accepted", "recovered", "bonus"]
"""prefill: sampled behind the prompt, in no block. recovered: drawn where a draft was rejected. bonus: drawn after all
drafts of the step were accepted."""


@dataclass(frozen=True, slots=True)
class Place:
    """`step` counts the verify steps of the request from 0, `place` the tokens of the block; both -1 for prefill."""

    step: int
    place: int
    kind: Kind

    def __str__(self) -> str:
        if self.kind == "prefill":
            return "the prefill"
        return f"place {self.place} of the block of verify step {self.step} ({self.kind})"


PREFILL = Place(-1, -1, "prefill")


def places(run: Run, done: Completion) -> tuple[Place, ...]:
    """One place per output token, from the accept and draft lengths; empty where the engine does not give them, or
    they do not add up to the output (which is for COUNT-2 to tell).

    In a tree a recovered token at the depth that the deepest path ends at reads as "bonus" only where as many tokens
    were accepted as steps were drafted.
    """
    if done.accept_lens is None or done.draft_lens is None or run.setup.drafter is None:
        return ()
    out = [] if run.capabilities.drafts_with_prefill else [PREFILL]
    num_steps = run.setup.drafter.num_steps
    for step, (accept_len, draft_len) in enumerate(zip(done.accept_lens, done.draft_lens, strict=False)):
        out += _block(step, accept_len, min(draft_len, num_steps))
    return tuple(out[: len(done.token_ids)]) if len(out) >= len(done.token_ids) else ()


def _block(step: int, accept_len: int, num_steps: int) -> Sequence[Place]:
    last: Kind = "bonus" if accept_len > num_steps else "recovered"
    accepted = [Place(step, place, "accepted") for place in range(accept_len - 1)]
    return [*accepted, Place(step, accept_len - 1, last)]
