"""Checkpoints that do not fit: copies of good ones with one thing wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]


def _largest(weights: Weights) -> str:
    """A matrix that matters: the one with most entries, the first by name of equals."""
    return min(weights, key=lambda name: (-weights[name].numel(), name))


def missing(weights: Weights) -> None:
    del weights[_largest(weights)]


def renamed(weights: Weights) -> None:
    name = _largest(weights)
    weights[f"{name}.old"] = weights.pop(name)


def transposed(weights: Weights) -> None:
    """Another shape with the same number of entries, where the matrix is not square; else one row less."""
    name = _largest(weights)
    square = weights[name].shape[0] == weights[name].shape[1]
    weights[name] = weights[name][:-1].contiguous() if square else weights[name].T.contiguous()


def one_row_short(weights: Weights) -> None:
    name = _largest(weights)
    weights[name] = weights[name][:-1].contiguous()


FAULTS: dict[str, Callable[[Weights], None]] = {
    fault.__name__: fault for fault in (missing, renamed, transposed, one_row_short)
}


def mutilate(checkpoint: Path, into: Path, fault: Callable[[Weights], None]) -> Path:
    """Copy a checkpoint to `into` and break its weights."""
    shutil.copytree(checkpoint, into)
    weights = load_file(into / "model.safetensors")
    fault(weights)
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    return into


def unknown_architecture(checkpoint: Path, into: Path) -> Path:
    """Copy a checkpoint to `into` under an architecture that nobody has."""
    shutil.copytree(checkpoint, into)
    config = json.loads((into / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}
    (into / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return into
