"""Draft slots equal their reference."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.assign_draft_slots import assign_draft_slots
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=batches,
    width=st.integers(1, 40),
    num_slots=st.sampled_from([0, 1, 2, 7, 8, 33]),
    seed=seeds,
    extra=st.integers(0, 2),
)
def test_equals_reference(rows: int, width: int, num_slots: int, seed: int, extra: int) -> None:
    random = generator(seed)
    table = torch.randint(0, 1000, (10, width), generator=random)
    request_rows = torch.randperm(10, generator=random)[:rows]
    seq_lens = torch.randint(0, width + 1, (rows,), generator=random)
    compare(assign_draft_slots, strided(table, extra), request_rows, seq_lens, num_slots)
