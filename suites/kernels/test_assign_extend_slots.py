"""Extend slots equal their reference."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.assign_extend_slots import assign_extend_slots
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=batches,
    width=st.sampled_from([1, 9, 40, 300]),
    slack=st.integers(-2, 3),
    seed=seeds,
    extra=st.integers(0, 2),
)
def test_equals_reference(rows: int, width: int, slack: int, seed: int, extra: int) -> None:
    random = generator(seed)
    table = torch.randint(0, 1000, (10, width), generator=random)
    request_rows = torch.randperm(10, generator=random)[:rows]
    starts = torch.randint(0, width + 1, (rows,), generator=random)
    ends = starts + torch.randint(0, width + 2, (rows,), generator=random)
    num_slots = max(0, int((ends.clamp(max=width) - starts).sum()) + slack)
    compare(assign_extend_slots, strided(table, extra), request_rows, starts, ends, num_slots)
