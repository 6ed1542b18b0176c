"""Matrix products on a CPU by FBGEMM: weights in float16, activations and sums in float32.

Nothing is rounded: only weights are packed that float16 holds exactly, once they are multiplied by a power of two. Most
that were stored in bfloat16 are of this kind. The library's own product takes two to three times as long, and its sums
depend on how many rows there are; these do not.
"""

from __future__ import annotations

import math
import warnings

import torch

LARGEST = torch.finfo(torch.float16).max


class PackedWeight:
    """A copy of `weight` [in, out] in FBGEMM's order. Made again when the weight has been written to since."""

    # Whoever looks for tensors in a model must find the weight, not the handle that stands for its packed copy.
    __slots__ = ("_packed", "_scale", "_source", "_version")

    def __init__(self, weight: torch.Tensor) -> None:
        self._source = weight
        self._pack()

    def _pack(self) -> None:
        weight = self._source
        self._version = weight._version
        self._packed: torch.Tensor | None = None
        self._scale = _scale(weight)
        if self._scale:
            with warnings.catch_warnings():
                # Newer releases say, once, that the operator will go; where it is gone `packed` does without.
                warnings.simplefilter("ignore", UserWarning)
                self._packed = torch.fbgemm_pack_gemm_matrix_fp16((weight / self._scale).t().contiguous())
                torch.fbgemm_linear_fp16_weight_fp32_activation(weight.new_zeros(1, len(weight)), self._packed, None)

    def multiply(self, x: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor | None:
        """x [T, in] -> x @ weight + added [T, out]; None where the weights are such that float16 would round them."""
        if self._source._version != self._version:
            self._pack()
        if self._packed is None:
            return None
        product = torch.fbgemm_linear_fp16_weight_fp32_activation(x, self._packed, None)
        if added is not None:
            return torch.add(added, product, alpha=self._scale)
        return product if self._scale == 1.0 else product.mul_(self._scale)


def _scale(weight: torch.Tensor) -> float:
    """A power of two; float16 holds the weights exactly when they are divided by it. 0.0 when there is none."""
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if not largest < math.inf:
        return 0.0
    scales = [1.0]
    if largest > 0.0:
        # What is as large as can be has the most digits left at its lower end.
        scales.append(2.0 ** -math.floor(math.log2(LARGEST / largest)))
    return next((s for s in scales if torch.equal((weight / s).half().float() * s, weight)), 0.0)


def packed(weight: torch.Tensor) -> PackedWeight | None:
    """None where there is no such product: on other devices, in other precisions, on other processors."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.is_inference():
        return None
    offered = hasattr(torch, "fbgemm_linear_fp16_weight_fp32_activation")
    return PackedWeight(weight) if offered and "fbgemm" in torch.backends.quantized.supported_engines else None
