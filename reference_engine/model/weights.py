"""What a model was loaded with, found by walking it, and read again into the same memory.

Models are plain objects that hold plain tensors, so whoever shares a tensor (a drafter its target's embeddings, a
recorded CUDA graph all of them) sees the new values, and what a constructor derives from a file is derived again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch

from reference_engine.config import require
from reference_engine.model.config import ModelConfig

_MEND = "is another model than the one that was started; start a new engine"


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors, and the configurations that say how they are used, by their path in a model."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    configs: dict[str, ModelConfig] = field(default_factory=dict)

    @classmethod
    def of(cls, part: object, name: str, without: Collection[object] = ()) -> Weights:
        """Everything below `part`, save the objects in `without` and tensors that share memory with theirs."""
        found, shared = cls(), cls()
        for number, other in enumerate(without):
            shared._add(other, str(number), set())
        found._add(part, name, {id(other) for other in without})
        memory = {tensor.data_ptr() for tensor in shared.tensors.values()}
        own = {path: tensor for path, tensor in found.tensors.items() if tensor.data_ptr() not in memory}
        return cls(own, found.configs)

    def _add(self, part: object, path: str, left_out: Collection[int]) -> None:
        if isinstance(part, torch.Tensor):
            self.tensors[path] = part
        elif isinstance(part, ModelConfig):
            self.configs[path] = part
        else:
            for name, value in _parts(part):
                if id(value) not in left_out:
                    self._add(value, path + name, left_out)

    def __or__(self, other: Weights) -> Weights:
        return Weights(self.tensors | other.tensors, self.configs | other.configs)

    def require_same_form(self, read: Weights) -> None:
        """ValueError naming what differs, unless `read` can take the place of these."""
        odd = sorted(self.tensors.keys() ^ read.tensors.keys())
        require(not odd, "weights", odd[:5], _MEND)
        for path, tensor in self.tensors.items():
            shape = list(read.tensors[path].shape)
            require(shape == list(tensor.shape), path, shape, f"{_MEND} (which has {list(tensor.shape)} there)")
        for path, config in self.configs.items():
            require(read.configs.get(path) == config, path, read.configs.get(path), f"{_MEND} (which has {config})")

    def equal(self, read: Weights) -> bool:
        """Whether every tensor has the same values in both."""
        return all(torch.equal(tensor, read.tensors[path]) for path, tensor in self.tensors.items())

    @torch.no_grad()
    def copy_from(self, read: Weights) -> None:
        for path, tensor in self.tensors.items():
            tensor.copy_(read.tensors[path])


def _parts(part: object) -> Iterator[tuple[str, object]]:
    """What a list or an object of this package holds, with a piece of path for each."""
    if isinstance(part, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(part))
    elif type(part).__module__.startswith("reference_engine."):
        yield from ((f".{name}", value) for name, value in getattr(part, "__dict__", {}).items())
