"""Weights from safetensors, by name and shape, with nothing missing and nothing left over."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from reference_engine.model.config import read_object

SINGLE_FILES = ("model.safetensors", "medusa_lm_head.safetensors")
"""Names of a checkpoint in one file, in order of preference; the second is that of FasterDecoding's heads."""


class Checkpoint:
    """The tensors of one checkpoint folder. `take` hands out a copy of each, since what was read is mapped from the
    file, which may be written to while the model runs; `finish` refuses what nobody took.

    Raises ValueError that names the tensor, its shape and what was expected.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.path = path
        self._dtype = dtype
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        self._taken: set[str] = set()
        for file in self._files():
            self._read(file)

    def _read(self, file: Path) -> None:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  # safe_open is not a mapping
                    self._tensors[name] = handle.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(
                f"{file}: is no whole safetensors file ({error}); it was cut or damaged, copy it again"
            ) from error

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int, integer: bool = False) -> torch.Tensor:
        if name not in self._tensors:
            raise ValueError(f"{self.path}: tensor {name!r} is missing; expected shape {list(shape)}")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{self.path}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
        self._taken.add(name)
        if integer:
            return tensor.to(self._device, torch.long, copy=True)
        # NaN passes through both; `isfinite` takes six times as long.
        low, high = tensor.aminmax()
        if not (low > -math.inf and high < math.inf):
            raise ValueError(f"{self.path}: tensor {name!r} holds NaN or infinite values; the checkpoint is damaged")
        return tensor.to(self._device, self._dtype, copy=True)

    def take_optional(self, name: str, *shape: int) -> torch.Tensor | None:
        return self.take(name, *shape) if name in self else None

    def finish(self, ignore: str = r"rotary_emb\.inv_freq$") -> None:
        left = sorted(name for name in self._tensors if name not in self._taken and not re.search(ignore, name))
        if left:
            raise ValueError(f"{self.path}: tensors that this architecture does not have: {', '.join(left[:5])}")

    def _files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            names = read_object(index).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
                raise ValueError(f"{index}: weight_map={names!r}: must say for each tensor which file holds it")
            files = [self.path / name for name in sorted(set(names.values()))]
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise ValueError(
                    f"{index}: weight_map names {', '.join(missing[:5])}: no such file beside it; copy it, too"
                )
            return files
        for name in SINGLE_FILES:
            if (self.path / name).is_file():
                return [self.path / name]
        raise ValueError(
            f"{self.path}: no model.safetensors there; only safetensors checkpoints are loaded, convert others"
        )
