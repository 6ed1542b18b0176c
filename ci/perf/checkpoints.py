"""Checkpoints that are measured. To add one: a line in `CHECKPOINTS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.known_answer import build
from harness.workloads.lanes import LANES
from harness.workloads.random_checkpoints import random_checkpoint

WITH_TARGET_ALONE = ("none",)
RANDOM_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "initializer_range": 0.12,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`write` puts it into a folder and returns the one that holds `target` and the folders that the lanes name.
    `margin`: by how much (relative) its counted figures may differ between machines; 0 where no token depends on
    rounding."""

    name: str
    write: Callable[[Path], Path]
    lanes: tuple[str, ...] = tuple(LANES)
    margin: float = 0.0


def _known_answer(name: str, folder: Path) -> Path:
    (written,) = build(folder, [name])
    return written


def _random(folder: Path) -> Path:
    """15 MB of weights: time goes into arithmetic, not only into Python."""
    random_checkpoint(folder / "random" / "target", seed=0, **RANDOM_SHAPE)
    return folder / "random"


CHECKPOINTS = {
    one.name: one
    for one in (
        Checkpoint(name="walk", write=partial(_known_answer, "walk")),
        Checkpoint(name="census", write=partial(_known_answer, "census")),
        Checkpoint(name="random", write=_random, lanes=WITH_TARGET_ALONE, margin=0.01),
    )
}


def write_all(folder: Path) -> dict[str, Path]:
    """Every checkpoint, by name."""
    return {name: one.write(folder) for name, one in CHECKPOINTS.items()}
