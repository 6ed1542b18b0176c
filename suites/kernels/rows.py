"""Rows that samplers get, good and hostile, and their random numbers."""

from __future__ import annotations

import pytest
import torch

from suites.kernels.support import generator

VOCABS = (2, 3, 5, 15, 16, 17, 100, 127, 128, 129, 500, 512)
EDGE_VOCABS = (1, 1023, 1024, 1025, 2500)
"""One lane to one tile and a few lanes more."""

HOSTILE = ("zeros", "nan", "inf", "some nan", "some inf", "negative", "one-hot", "sparse", "tiny")


def probabilities(shape: tuple[int, ...], seed: int, hostile: bool = True) -> torch.Tensor:
    """[..., V] float32 laws; with `hostile` about half the rows are anything but."""
    rng = generator(seed)
    probs = (3 * torch.randn(shape, generator=rng)).softmax(-1)
    rows = probs.view(-1, shape[-1])
    for row in rows if hostile else ():
        spoil(row, int(torch.randint(2 * len(HOSTILE), (), generator=rng)), rng)
    return probs


def spoil(row: torch.Tensor, kind: int, rng: torch.Generator) -> None:
    """In place; kinds past the end of HOSTILE leave the row as it is."""
    name = HOSTILE[kind] if kind < len(HOSTILE) else ""
    some = torch.rand(row.shape, generator=rng) < 0.5
    # The interpreter loses the bits of subnormal bfloat16 numbers: tiny stays above them.
    fills = {"zeros": 0.0, "nan": torch.nan, "inf": torch.inf, "tiny": 1e-37}
    if name in fills:
        row.fill_(fills[name])
    elif name == "some nan":
        row[some] = torch.nan
    elif name == "some inf":
        row[some] = torch.inf
    elif name == "negative":
        row[some] *= -1
    elif name == "sparse":
        row[some] = 0.0
    elif name == "one-hot":
        row.zero_()[int(torch.randint(len(row), (), generator=rng))] = 1.0


def uniforms(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """float64 in [0, 1), a few at the very ends."""
    coins = torch.rand(shape, generator=generator(seed), dtype=torch.double)
    ends = torch.rand(shape, generator=generator(seed + 1))
    return torch.where(ends < 0.05, 0.0, torch.where(ends > 0.95, 1 - 2.0**-53, coins))


def offset_rows(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """[3, ...] float16: the row stride fits 32 bits, twice as much does not; no memory backs what lies between rows,
    or before the first, where a product that wraps around would land. Skips the test where there
    is not even the address space."""
    far, below = 2**30 + 64, 2**31 + 2**30
    try:
        storage = torch.empty(below + 2 * far + rows[0].numel(), dtype=rows.dtype, device=device)
    except RuntimeError:
        pytest.skip("no room for a tensor of 10 GiB")
    view = storage.as_strided(rows.shape, (far, *rows[0].contiguous().stride()), below)
    return view.copy_(rows)


def logits(shape: tuple[int, ...], seed: int, hostile: bool = True) -> torch.Tensor:
    """[..., V] float32; with `hostile` about half the rows have ties, -inf, NaN, +inf, or nothing else."""
    rng = generator(seed)
    values = 3 * torch.randn(shape, generator=rng)
    for row in values.view(-1, shape[-1]) if hostile else ():
        kind = int(torch.randint(12, (), generator=rng))
        some = torch.rand(row.shape, generator=rng) < 0.4
        if kind < 2:
            row.copy_(row.round())
        elif kind == 2:
            row[some] = -torch.inf
        elif kind == 3:
            row[some] = torch.nan
        elif kind == 4:
            row[some] = torch.inf
        elif kind < 7:
            row.fill_((0.0, -torch.inf)[kind - 5])
    return values
