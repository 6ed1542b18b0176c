"""EXTRACT_HIDDEN_STATES: the draft is the token that was sampled last; what it keeps is `Target.layer_states`."""

from __future__ import annotations

from collections.abc import Sequence

from harness.known_answer.base import Drafter, Target

AUX_LAYER_IDS = (4, 0, 2)
"""What the known-answer lane keeps of the four layers: what leaves the last, enters the first, and one between."""


class ExtractHiddenStatesDrafter(Drafter):
    """For any target, without a checkpoint. A draft is right exactly when the target repeats its token."""

    method = "EXTRACT_HIDDEN_STATES"

    def __init__(self, target: Target) -> None:
        self.target = target
        self.config, self.weights = {}, {}

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        return tuple(tokens[-1:])[:k]
