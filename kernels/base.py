"""What every kernel file shares: the choice of backend, argument checks, and the record that the registry lists.

A kernel file holds a Triton kernel, its launcher, its torch reference, and one public function that takes `backend` and
calls one of the two. References are the definition: plain torch, on any device, in any precision.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Backend = Literal["torch", "triton"]
Choice = Literal["auto", "torch", "triton"]


def interpreted() -> bool:
    """Whether Triton kernels run under its interpreter, by the variable or by the knob of a process that set it. Triton
    looks at them when a kernel file is imported."""
    triton = sys.modules.get("triton")
    return _asked_to_interpret() if triton is None else bool(triton.knobs.runtime.interpret)


def _asked_to_interpret() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def choose_backend(choice: Choice, device: torch.device) -> Backend:
    """`auto` is Triton on CUDA, and on a CPU when TRITON_INTERPRET=1; else the torch references.

    Raises ValueError when Triton is asked for where it can neither run compiled nor interpreted.
    """
    if choice not in ("auto", "torch", "triton"):
        raise ValueError(f"kernels={choice!r}: must be 'auto', 'torch' or 'triton'")
    possible = device.type == "cuda" or interpreted()
    wanted = choice == "triton" or (choice == "auto" and (device.type == "cuda" or _asked_to_interpret()))
    if choice == "triton" and not possible:
        raise ValueError(
            f"kernels='triton': device {device} cannot run Triton; use a CUDA device, or set TRITON_INTERPRET=1 in the "
            "environment before Python starts to run the interpreter"
        )
    return "triton" if possible and wanted else "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One compilation that the engine can ask for: types of the run-time arguments, values of the constants.

    `signature` maps every argument of the Triton function to its type ("*i64", "*fp32", "i32", ...), in order, with
    "constexpr" for constants, whose values `constexprs` gives. `divisible` names those that are multiples of 16
    (pointers: in bytes), which Triton finds out by itself at a launch: loads can be wide then.
    """

    function: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A row of the registry. `shapes` is one line for people; `properties` names what the suite checks; `spills` states
    why register spills of up to `spill_limit` are accepted (bytes a thread on NVIDIA, registers on AMD)."""

    name: str
    shapes: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    variants: tuple[Variant, ...]
    properties: tuple[str, ...]
    spills: str | None = None
    spill_limit: int = 0

    def __post_init__(self) -> None:
        if (self.spills is None) != (self.spill_limit == 0):
            raise ValueError(f"{self.name}: spill_limit={self.spill_limit}, spills={self.spills!r}: give both or none")


class Registry(Mapping[str, Kernel]):
    """Kernels by the name of their file, which is imported when it is first asked for: naming kernels costs nothing,
    and Triton decides there and then whether to interpret."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __getitem__(self, name: str) -> Kernel:
        if name not in self._names:
            raise KeyError(f"no kernel {name!r}; there are {', '.join(self._names)}")
        kernel: Kernel = importlib.import_module(f"kernels.{name}").KERNEL
        return kernel

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def expect(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `tensor` has this shape (None = any size) and one of the dtypes (none given = any)."""
    fits = len(shape) == tensor.dim() and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}.shape={list(tensor.shape)}: must be [{wanted}]")
    if dtypes and tensor.dtype not in dtypes:
        raise ValueError(f"{name}.dtype={tensor.dtype}: must be {' or '.join(map(str, dtypes))}")


def expect_together(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"tensors are on different devices: {listed}; move them to one")


def expect_inner_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless neighbours along the last dim are neighbours in memory; outer strides are free."""
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}.stride()={tensor.stride()}: the last dim must have stride 1; call .contiguous()")


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def expect_uniform(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise ValueError unless `tensor` has this shape and holds float32 or float64: coarser numbers cannot be coins."""
    expect(name, tensor, shape, torch.float32, torch.float64)


VOCAB_WARPS = 8
"""Warps of a program that goes over a whole row of the vocabulary, tile by tile."""


def vocab_block(vocab: int, largest: int = 1024) -> int:
    """Lanes of a tile over the vocabulary: a power of two."""
    return min(largest, max(16, 1 << max(vocab - 1, 0).bit_length()))
