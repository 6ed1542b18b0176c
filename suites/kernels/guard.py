"""Runs a kernel and its reference on the same arguments, with every tensor between guard bands.

Arguments are copied, strides kept, into buffers [pad | tensor | pad] full of a canary; what a launcher allocates is put
between such pads too, and poisoned. Afterwards the outputs are compared, and the buffers of the arguments byte by byte:
that covers results written in place, arguments that should not have changed, gaps between strided rows, and the pads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CANARY = 0xA5
"""Byte of the pads, and of poisoned integers and flags: nothing that a kernel writes looks like it."""
NAN = 0xFF
"""Byte of poisoned floats."""
PAD = 512
"""Bytes on either side."""

_ALLOCATORS: dict[Callable[..., Any], bool] = {
    torch.empty: False,
    torch.empty_like: False,
    torch.zeros: True,
    torch.ones: True,
    torch.full: True,
    torch.full_like: True,
    torch.zeros_like: True,
}
"""What launchers allocate with, and whether the content that it gives is wanted."""


def _band(nbytes: int) -> torch.Tensor:
    # Made on the host: inside a Guard nothing may allocate through the functions that it watches.
    return torch.from_numpy(_canary_bytes(nbytes + 2 * PAD)).to(DEVICE)


def _canary_bytes(count: int) -> Any:
    import numpy

    return numpy.full(count, CANARY, dtype=numpy.uint8)


def fenced_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy on the device with the same strides, and the whole buffer that it lies in, as bytes."""
    extent = (
        0 if tensor.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    )
    raw = _band(extent * tensor.element_size())
    flat = raw[PAD : PAD + extent * tensor.element_size()].view(tensor.dtype)
    copy = flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
    if tensor.numel():
        copy.copy_(tensor)
    return copy, raw


class Guard(TorchFunctionMode):
    """While entered, tensors that are allocated lie between pads; `check` then says whether the pads are whole."""

    def __init__(self) -> None:
        super().__init__()
        self._bands: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return self._fence(made, _ALLOCATORS[func]) if func in _ALLOCATORS else made

    def _fence(self, made: torch.Tensor, keep: bool) -> torch.Tensor:
        raw = _band(made.numel() * made.element_size())
        inner = raw[PAD : len(raw) - PAD]
        if made.dtype.is_floating_point:
            inner.fill_(NAN)
        fenced = inner.view(made.dtype).view(made.shape)
        if keep:
            fenced.copy_(made)
        self._bands.append(raw)
        return fenced

    def check(self) -> None:
        for number, raw in enumerate(self._bands):
            for side, pad in (("before", raw[:PAD]), ("behind", raw[len(raw) - PAD :])):
                assert bool((pad == CANARY).all()), f"allocation {number}: written {side} its bounds"


def tensors_of(result: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result: one, or a tuple of them (None left out)."""
    if isinstance(result, torch.Tensor):
        yield result
    elif result is not None:
        for part in result:
            yield from tensors_of(part)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(expected: torch.Tensor, got: torch.Tensor, label: str, atol: float, rtol: float) -> None:
    """Exact, bit for bit (but any NaN is as good as another), unless tolerances are given."""
    assert got.dtype == expected.dtype, f"{label}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{label}: shape {list(got.shape)}, expected {list(expected.shape)}"
    if got.dtype == torch.bool and got.numel():
        assert int(_bytes(got).max()) <= 1, f"{label}: flags that were never written"
    if not bool(((got == expected) | ((got != got) & (expected != expected))).all()):
        torch.testing.assert_close(got, expected, atol=atol, rtol=rtol, equal_nan=True, msg=lambda m: f"{label}: {m}")


def compare(
    call: Callable[..., Any], *args: Any, atol: float = 0.0, rtol: float = 0.0, **kwargs: Any
) -> tuple[Any, list[torch.Tensor]]:
    """Call with backend="torch" and backend="triton"; returns the Triton result and the arguments as it left them.

    Raises AssertionError where results, arguments or guard bands differ.
    """
    sides: dict[str, tuple[Any, list[torch.Tensor], list[torch.Tensor]]] = {}
    for backend in ("torch", "triton"):
        views, raws = [], []

        def fenced(value: Any, views: list[torch.Tensor] = views, raws: list[torch.Tensor] = raws) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            view, raw = fenced_copy(value)
            views.append(view)
            raws.append(raw)
            return view

        given, named = [fenced(value) for value in args], {name: fenced(value) for name, value in kwargs.items()}
        guard = Guard()
        if backend == "triton":
            with guard:
                result = call(*given, **named, backend=backend)
        else:
            result = call(*given, **named, backend=backend)
        guard.check()
        sides[backend] = result, views, raws
    (expected, _, reference_raws), (got, left, raws) = sides["torch"], sides["triton"]
    for number, (want, have) in enumerate(zip(tensors_of(expected), tensors_of(got), strict=True)):
        assert_same(want, have, f"output {number}", atol, rtol)
    for number, (want, have) in enumerate(zip(reference_raws, raws, strict=True)):
        assert torch.equal(want, have), f"argument {number}: its memory differs after the call"
    return got, left
