"""STANDALONE: a smaller Llama model that has learnt from the target's laws."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from harness.trained.feature import distance
from harness.trained.target import Lesson, Llama


class Standalone(Llama):
    method = "STANDALONE"

    def __init__(self, target: Llama) -> None:
        """Half the width and two layers."""
        shape = target.shape
        super().__init__(
            dataclasses.replace(
                shape,
                hidden_size=shape.hidden_size // 2,
                intermediate_size=shape.intermediate_size // 2,
                num_layers=2,
                num_heads=2,
                num_kv_heads=1,
            )
        )

    def loss(self, lesson: Lesson) -> Tensor:
        """Mean distance from what the target says."""
        return distance(self(lesson.ids).logits, lesson.logits)
