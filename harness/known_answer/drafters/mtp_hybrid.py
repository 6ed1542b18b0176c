"""MTP for a hybrid target: attention layers of the MiMo layout over the rows of a model that has a recurrent state.

The drafter has no state of its own. It takes the counts from the row of p that it is fed, adds the token x, and hands
them on with its output row: it carries on the recurrence of its target in its rows, and a row of a wrong state gives a
wrong draft.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.known_answer.base import Drafter, Weights
from harness.known_answer.blocks import Shape
from harness.known_answer.drafters.mtp import CensusMtp
from harness.known_answer.drafters.rows import CensusRule
from harness.known_answer.hybrid import SEEN_UNIT, HybridTarget


@dataclass(frozen=True, slots=True)
class HybridRule(CensusRule):
    def counted(self, fed: Sequence[int], token: int) -> Sequence[int]:
        """Everything before the draft: what the row of p has counted, and x."""
        return (*fed, token)


class HybridMtp(CensusMtp):
    """One layer; its rows are those of `CensusMtp` with the block `seen`."""

    rule_type = HybridRule

    def __init__(self, target: HybridTarget, errs_on: Collection[int] = ()) -> None:
        self.places = target.places
        super().__init__(target, errs_on)
        del self.config["auto_map"]  # no Qwen2 configuration fits

    def _layer(self, layer: int, shape: Shape) -> Weights:
        weights = super()._layer(layer, shape)
        merge = weights[f"model.mtp_layers.{layer}.input_proj.weight"]
        for token in range(shape.vocab_size):
            merge[self.places.seen + token, self.places.seen + token] = 1.0
            merge[self.places.seen + token, shape.hidden_size + self.places.current + token] = 1 / SEEN_UNIT
        return weights

    def write(self, directory: Path) -> None:
        Drafter.write(self, directory)
