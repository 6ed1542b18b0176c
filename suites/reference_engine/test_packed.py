"""Products with packed weights: nothing is rounded that the plain product would not round, and no copy goes stale."""

from __future__ import annotations

import pytest
import torch

from reference_engine.model.layers import Linear
from reference_engine.model.packed import packed
from reference_engine.model.weights import Weights
from suites.registration import suite

suite(seconds=0.3, stage="cpu", needs="cpu")

IN, OUT = 96, 40
needs_fbgemm = pytest.mark.skipif(
    packed(torch.ones(2, 2)) is None, reason="this build of PyTorch, or this processor, has no FBGEMM"
)


def stored_in_bfloat16(scale: float = 0.1) -> torch.Tensor:
    """[OUT, IN], with magnitudes down to what float16 alone would round."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(OUT, IN, generator=random)
    weight[0, :8] = torch.tensor([2.0**-power for power in range(12, 28, 2)]) * 1.3
    return (weight * scale).bfloat16().float()


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, IN, generator=torch.Generator().manual_seed(1))


@needs_fbgemm
@pytest.mark.parametrize("scale", [1e-3, 0.1, 30.0])
def test_weights_of_a_bfloat16_checkpoint_are_packed_without_rounding(scale: float) -> None:
    """An identity reads every weight back, to the bit."""
    weight = stored_in_bfloat16(scale).t().contiguous()
    found = packed(weight)
    assert found is not None
    read = found.multiply(torch.eye(IN), None)
    assert read is not None
    assert torch.equal(read, weight)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count", [0, 1, 4, 33])
def test_a_product_is_as_precise_as_float32(count: int, *, biased: bool) -> None:
    weight, bias, residual = stored_in_bfloat16(), torch.linspace(-1, 1, OUT), torch.full((count, OUT), 0.5)
    linear = Linear([weight], [bias] if biased else [])
    exact = rows(count).double() @ weight.t().double() + (bias.double() if biased else 0)
    torch.testing.assert_close(linear(rows(count)).double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(linear(rows(count), residual).double(), exact + 0.5, rtol=0, atol=1e-5)
    assert torch.equal(residual, torch.full((count, OUT), 0.5))


@needs_fbgemm
def test_a_row_does_not_depend_on_how_many_others_there_are() -> None:
    linear = Linear([stored_in_bfloat16()])
    together = linear(rows(32))
    for count in (1, 2, 3, 5, 8, 17):
        assert torch.equal(linear(rows(32)[:count]), together[:count])


def test_weights_that_would_be_rounded_are_multiplied_as_they_are() -> None:
    weight = torch.full((OUT, IN), 1 / 3)
    linear = Linear([weight])
    exact = rows(4).double() @ weight.t().double()
    torch.testing.assert_close(linear(rows(4)).double(), exact, rtol=0, atol=1e-5)
    found = packed(weight)
    assert found is None or found.multiply(rows(4)[:, :OUT], None) is None


@pytest.mark.parametrize("after", [0.25, 1 / 3, float("nan"), float("inf"), 0.0])
def test_weights_that_are_written_to_are_packed_again(after: float) -> None:
    linear = Linear([stored_in_bfloat16()])
    linear(rows(2))
    with torch.no_grad():
        linear.weight.fill_(after)
    expected = torch.mm(rows(2), linear.weight)
    torch.testing.assert_close(linear(rows(2)), expected, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_not_packed(dtype: torch.dtype) -> None:
    assert packed(torch.ones(4, 4, dtype=dtype)) is None


def test_who_looks_for_weights_finds_them_once() -> None:
    """Copying what stands for the packed copy would copy an address."""
    assert list(Weights.of(Linear([stored_in_bfloat16()]), "linear").tensors) == ["linear.weight"]
