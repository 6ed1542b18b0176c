"""Slots entered in the request table equal their reference; the rest of the table keeps its content."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.copy_request_slots import copy_request_slots
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=batches,
    width=st.sampled_from([1, 9, 40, 300]),
    slack=st.integers(0, 3),
    seed=seeds,
    extra=st.integers(0, 2),
)
def test_equals_reference(rows: int, width: int, slack: int, seed: int, extra: int) -> None:
    random = generator(seed)
    table = torch.full((10, width), -7)
    request_rows = torch.randperm(10, generator=random)[:rows]
    starts = torch.randint(0, width + 1, (rows,), generator=random)
    ends = starts + torch.randint(0, width + 2, (rows,), generator=random)
    slots = torch.arange(int((ends - starts).sum()) + slack)
    (out), _ = compare(copy_request_slots, strided(table, extra), request_rows, starts, ends, slots)
    written = int((ends.clamp(max=width) - starts).sum())
    assert int((out >= 0).sum()) == written
