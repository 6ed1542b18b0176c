"""Objects of the contract as plain JSON values and back: tensors as views of storages, infinities as words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: `storage` names a one-dimensional entry of a safetensors file, whose dtype is the tensor's; `stride`
    and `offset` count elements."""

    storage: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Storages:
    """Every storage once, under a name; tensors become views of them. They must all be alive until the last one: equal
    addresses are taken for shared memory."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[int, str], str] = {}

    def view(self, tensor: torch.Tensor) -> View:
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), str(tensor.dtype)
        name = self._names.get(key) if storage.nbytes() else None
        if name is None:
            name = self._names[key] = f"s{len(self.tensors)}"
            size = storage.nbytes() // tensor.element_size()
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (size,), (1,))
            self.tensors[name] = whole.detach().cpu().clone()
        return View(name, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


class Packed:
    """Storages that came from outside, as safetensors bytes: nothing that a view says is trusted. `where` is named in
    errors. Raises ValueError for bytes that are no safetensors."""

    def __init__(self, data: bytes, where: str = "the tensors") -> None:
        self._where = where
        try:
            self._storages: Mapping[str, torch.Tensor] = load(data) if data else {}
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{where}: not safetensors, or not whole ({error})") from error

    def tensor(self, value: Any) -> torch.Tensor:
        """The tensor that a view stands for. Raises ValueError when it is none."""
        view = msgspec.convert(value, View)
        storage = self._storages.get(view.storage)
        if storage is None:
            raise ValueError(f"tensor {view.storage!r} is not in {self._where}")
        if len(view.shape) != len(view.stride) or min((*view.shape, *view.stride, view.offset), default=0) < 0:
            raise ValueError(f"{view} is no tensor: a stride for each dim, and nothing negative")
        last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride, strict=True))
        if 0 not in view.shape and last >= storage.numel():
            raise ValueError(f"{view} reaches beyond the {storage.numel()} elements of its storage")
        return storage.as_strided(view.shape, view.stride, view.offset)


def plain(value: object, storages: Storages | None = None) -> Any:
    """A value of the contract as JSON has it. Tensors go into `storages`; without any there must be none."""

    def hook(inner: object) -> object:
        if isinstance(inner, torch.Tensor) and storages is not None:
            return asdict(storages.view(inner))
        if isinstance(inner, Path):
            return str(inner)
        raise NotImplementedError(f"{type(inner).__name__} has no place here")

    return _with_words(msgspec.to_builtins(value, enc_hook=hook))


def decoded(value: Any, type_: type[T], tensors: Packed) -> T:
    """What `plain` made, as an object of that type. Raises ValueError saying what does not fit."""

    def hook(wanted: type, inner: Any) -> Any:
        if wanted is torch.Tensor:
            return tensors.tensor(inner)
        if issubclass(wanted, Path):
            return Path(inner)
        raise NotImplementedError(wanted)

    try:
        # Not strict: words stand for infinities.
        return msgspec.convert(value, type_, strict=False, dec_hook=hook)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _with_words(value: Any) -> Any:
    """Infinities and NaN as words: JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _with_words(inner) for name, inner in value.items()}
    return [_with_words(inner) for inner in value] if isinstance(value, list | tuple) else value
