"""Expansion per request equals its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.expand_per_request import TYPES, expand_per_request
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=batches,
    longest=st.sampled_from([0, 1, 8, 33]),
    replace=st.sampled_from([None, (0, 1), (1, 0)]),
    dtype=st.sampled_from(list(TYPES)),
    seed=seeds,
)
def test_equals_reference(
    rows: int, longest: int, replace: tuple[int, int] | None, dtype: torch.dtype, seed: int
) -> None:
    random = generator(seed)
    lens = torch.randint(0, longest + 1, (rows,), generator=random)
    values = torch.randint(0, 3, (rows,), generator=random).to(dtype)
    compare(expand_per_request, values, lens.cumsum(0), int(lens.sum()), replace=replace)


def test_fractions_stay_fractions() -> None:
    values = torch.tensor([0.25, 0.0, 0.75])
    out, _ = compare(expand_per_request, values, torch.tensor([1, 2, 4]), 4, replace=(0.0, 0.5))
    assert out.tolist() == [0.25, 0.5, 0.75, 0.75]


def test_refuses_tokens_of_nobody() -> None:
    nobody = torch.zeros(0, dtype=torch.long)
    with pytest.raises(ValueError, match="num_tokens=3"):
        expand_per_request(nobody, nobody, 3, backend="triton")
