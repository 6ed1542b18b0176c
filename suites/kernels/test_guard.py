"""The guard sees what a kernel must not do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.base import expect_inner_contiguous
from suites.kernels.guard import compare
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")

Fault = Callable[[torch.Tensor, torch.Tensor], None]
"""What goes wrong, given the argument and the output."""


def beyond(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The element `offset` places from the first, inside the bounds or not."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset)


FAULTS: dict[str, tuple[Fault, str]] = {
    "writes before its output": (lambda _, out: beyond(out, -1).fill_(0), "allocation 0: written before"),
    "writes behind its output": (lambda _, out: beyond(out, out.numel()).fill_(0), "allocation 0: written behind"),
    "leaves a place unwritten": (lambda _, out: out[-1:].copy_(torch.empty(1, dtype=out.dtype)), "output 0"),
    "is off by one in a place": (lambda _, out: out[-1:].add_(1), "output 0"),
    "writes to its argument": (lambda x, _: x[1, 1].add_(1), "argument 0"),
    "writes between strided rows": (lambda x, _: beyond(x, x.shape[1]).fill_(0), "argument 0"),
    "writes before its argument": (lambda x, _: beyond(x, -1).fill_(0), "argument 0"),
}


def total(x: torch.Tensor, fault: Fault | None, *, backend: str) -> torch.Tensor:
    out = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    out.copy_(x.sum(1))
    if fault is not None and backend == "triton":
        fault(x, out)
    return out


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str, dtype: torch.dtype) -> None:
    fault, message = FAULTS[name]
    x = torch.arange(20).view(4, 5).to(dtype)[:, :3]
    compare(total, x, None)
    with pytest.raises(AssertionError, match=message):
        compare(total, x, fault)


def test_flags_that_were_never_written_are_seen() -> None:
    def flags(x: torch.Tensor, *, backend: str) -> torch.Tensor:
        out = torch.empty(2, dtype=torch.bool, device=x.device)
        return out if backend == "triton" else out.fill_(True)

    with pytest.raises(AssertionError, match="never written"):
        compare(flags, torch.zeros(1))


def test_another_dtype_or_shape_is_seen() -> None:
    def wrong(x: torch.Tensor, change: str, *, backend: str) -> torch.Tensor:
        if backend == "torch":
            return x.clone()
        return x.int() if change == "dtype" else x[:, None].clone()

    for change in ("dtype", "shape"):
        with pytest.raises(AssertionError, match=change):
            compare(wrong, torch.arange(3), change)


def test_an_empty_tensor_has_no_neighbours_to_keep_together() -> None:
    """Whatever its strides say: an empty batch may come out of any slicing."""
    expect_inner_contiguous("hidden", torch.empty(0, 7).as_strided((0, 7), (1, 0)))
    with pytest.raises(ValueError, match="last dim must have stride 1"):
        expect_inner_contiguous("hidden", torch.empty(7, 2).mT)
