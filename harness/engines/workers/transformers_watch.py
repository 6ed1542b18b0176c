"""What transformers does not report about a generation, read off through its public hooks: the draft tokens that each
target forward verified, the accept lengths, and the raw logits before `generate` rounds them to float32.

Nothing is patched: a forward hook of torch and a `LogitsProcessor` that changes no score.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel


@dataclass(slots=True)
class TargetForward:
    """One forward of the target: `start` committed tokens (prompt included) before it, and the tokens under test.

    `logits` is [len(draft_token_ids) + 1, V] in the model's dtype. `chosen` is the argmax of the processed scores at
    each of these positions, which for a greedy request is what verification compares the drafts with.
    """

    draft_token_ids: tuple[int, ...]
    logits: torch.Tensor
    start: int = 0
    chosen: list[int] = field(default_factory=list)


class GenerationWatch(LogitsProcessor):
    """Records the target forwards of one `generate` call. Pass it as the only custom logits processor."""

    def __init__(self, prompt_len: int) -> None:
        self.forwards: list[TargetForward] = []
        self._num_committed_inputs = prompt_len

    @contextmanager
    def attached(self, target: PreTrainedModel) -> Iterator[None]:
        """The hook is in place inside the block only."""
        hook = target.register_forward_hook(self._target_forward, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # The drafter is generated with the same processors: the target's own calls are the first after its forward.
        forward = self.forwards[-1] if self.forwards else None
        if forward is not None and len(forward.chosen) <= len(forward.draft_token_ids):
            if not forward.chosen:
                forward.start = input_ids.shape[1]
            forward.chosen.append(int(scores[0].argmax()))
        return scores

    def _target_forward(self, _module: object, _args: object, kwargs: dict[str, Any], output: Any) -> None:
        input_ids = kwargs["input_ids"][0].tolist()
        drafts = tuple(input_ids[self._num_committed_inputs :])
        self.forwards.append(TargetForward(drafts, output.logits[0, -len(drafts) - 1 :].detach()))
        self._num_committed_inputs = 1

    def draft_lens(self) -> tuple[int, ...]:
        """Number of draft tokens verified in each target forward."""
        return tuple(len(forward.draft_token_ids) for forward in self.forwards)

    def accept_lens(self, sequence: list[int], *, greedy: bool) -> tuple[int, ...] | None:
        """Correct drafts + 1 per target forward, before any finish cut the last block; `sequence` has the prompt.

        None where it cannot be known: a sampled block that a finish cut behind an accepted draft.
        """
        lens: list[int] = []
        for forward, block in zip(self.forwards, self._blocks(sequence), strict=True):
            drafts = forward.draft_token_ids
            cut = len(block) <= len(drafts) and block[-1] == drafts[len(block) - 1]
            if not cut:
                lens.append(len(block))
            elif greedy:
                lens.append(1 + _common_prefix(drafts, forward.chosen))
            else:
                return None
        return tuple(lens)

    def raw_logits(self, sequence: list[int]) -> list[torch.Tensor]:
        """One row [V] per generated token, in the model's dtype."""
        rows: list[torch.Tensor] = []
        for forward, block in zip(self.forwards, self._blocks(sequence), strict=True):
            rows.extend(forward.logits[: len(block)])
        return rows

    def _blocks(self, sequence: list[int]) -> list[list[int]]:
        starts = [forward.start for forward in self.forwards]
        return [sequence[start:end] for start, end in zip(starts, [*starts[1:], len(sequence)], strict=True)]


def _common_prefix(left: tuple[int, ...], right: list[int]) -> int:
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return min(len(left), len(right))
