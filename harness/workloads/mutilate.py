"""Checkpoints that do not fit: copies of good ones with one thing wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
Fault = Callable[[Weights, str], None]
"""What is done to the tensor of that name."""


LOUD = 64.0
"""Standard deviation of noise that drowns what a bias beside it says."""


def missing(weights: Weights, name: str) -> None:
    del weights[name]


def renamed(weights: Weights, name: str) -> None:
    weights[f"{name}.old"] = weights.pop(name)


def transposed(weights: Weights, name: str) -> None:
    """Another shape with the same number of entries, where there is one; else one row less."""
    tensor = weights[name]
    if tensor.ndim < 2 or tensor.shape[0] == tensor.shape[1]:
        one_row_short(weights, name)
    else:
        weights[name] = tensor.T.contiguous()


def one_row_short(weights: Weights, name: str) -> None:
    weights[name] = weights[name][:-1].contiguous()


FAULTS: dict[str, Fault] = {fault.__name__: fault for fault in (missing, renamed, transposed, one_row_short)}
"""Faults of form: an engine can see them at start-up."""


def randomised(weights: Weights, name: str) -> None:
    """Noise as large as what was there (`LOUD` where that was nothing); integers in another order."""
    tensor = weights[name]
    generator = torch.Generator().manual_seed(len(name))
    if tensor.is_floating_point():
        size = float(tensor.double().square().mean().sqrt()) or LOUD
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        weights[name] = (size * noise).to(tensor.dtype)
    else:
        weights[name] = tensor[torch.randperm(len(tensor), generator=generator)]


class Workshop:
    """A copy of a checkpoint in `directory`, whose tensors can be damaged one after the other."""

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        shutil.copytree(checkpoint, directory)
        self.directory = directory
        self._good = load_file(checkpoint / "model.safetensors")

    @property
    def names(self) -> list[str]:
        """Tensors, the largest first."""
        return sorted(self._good, key=lambda name: (-self._good[name].numel(), name))

    def damage(self, fault: Fault, name: str) -> None:
        """The checkpoint with this fault and no other."""
        weights = dict(self._good)
        fault(weights, name)
        self._write(weights)

    def mend(self) -> None:
        """The checkpoint as it was."""
        self._write(self._good)

    def _write(self, weights: Weights) -> None:
        save_file(weights, self.directory / "model.safetensors", metadata={"format": "pt"})


def mutilate(checkpoint: Path, into: Path, fault: Fault) -> Path:
    """Copy a checkpoint to `into` and break its largest tensor."""
    workshop = Workshop(checkpoint, into)
    workshop.damage(fault, workshop.names[0])
    return into


def unknown_architecture(checkpoint: Path, into: Path) -> Path:
    """Copy a checkpoint to `into` under an architecture that nobody has."""
    shutil.copytree(checkpoint, into)
    config = json.loads((into / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}
    (into / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return into
