"""Comparing tensors row by row, and the tolerances that comparisons may use.

Tolerances hold per dtype of the engine. Logprobs are compared in nats, absolutely. Hidden rows and KV are compared by
the largest absolute difference of a row over max(1, largest magnitude of the expected row).
"""

from __future__ import annotations

import math

import torch

LOGPROB_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 5e-2}
ROW_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2}

NO_CHANCE = -1e3
"""Nats. At or below it a log probability says "never": engines write -inf, the lowest float or a large negative."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A float64 copy on the CPU, of whatever dtype and device the engine delivered."""
    return tensor.detach().to(device="cpu", dtype=torch.float64)


def row_errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[rows] largest scaled difference per row of two [rows, ...] float64 tensors; inf where `got` is not finite."""
    if got.numel() == 0:
        return torch.zeros(got.shape[0], dtype=torch.float64)
    flat_got, flat_expected = got.reshape(got.shape[0], -1), expected.reshape(got.shape[0], -1)
    scale = flat_expected.abs().amax(1).clamp(min=1.0)
    errors = (flat_got - flat_expected).abs().amax(1) / scale
    return torch.where(torch.isfinite(flat_got).all(1), errors, torch.full_like(errors, math.inf))


def matching_rows(row: torch.Tensor, pool: torch.Tensor, tolerance: float) -> list[int]:
    """Indices of the rows of a [rows, ...] pool that equal `row` within the tolerance."""
    if pool.shape[0] == 0 or pool.shape[1:] != row.shape:
        return []
    errors = row_errors(row.unsqueeze(0).expand_as(pool), pool)
    return [int(index) for index in torch.nonzero(errors <= tolerance).flatten()]


def same_logprob(got: float, expected: float, tolerance: float) -> bool:
    """Equality of two log probabilities in nats; NaN equals nothing, "never" equals "never"."""
    if got == expected or (got <= NO_CHANCE and expected <= NO_CHANCE):
        return True
    return abs(got - expected) <= tolerance


def show_difference(expected: torch.Tensor, got: torch.Tensor, limit: int = 6) -> tuple[str, str]:
    """Two rows of one shape for a message: the entries that differ, those that differ most first."""
    right, mine = plain(expected).flatten(), plain(got).flatten()
    gaps = torch.nan_to_num((mine - right).abs(), nan=math.inf)
    entries = sorted(torch.argsort(gaps, descending=True, stable=True)[:limit].tolist())
    entries = [entry for entry in entries if gaps[entry] > 0]
    more = "" if len(entries) < limit else f", ... ({int((gaps > 0).sum())} of {gaps.numel()} entries differ)"
    first, second = (
        ", ".join(f"[{entry}] {float(row[entry]):.6g}" for entry in entries) + more for row in (right, mine)
    )
    return first, second
