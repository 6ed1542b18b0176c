"""Shifted draft inputs equal their reference."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.shift_append import shift_append
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.3, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=batches,
    columns=st.one_of(st.integers(0, 9), st.sampled_from([127, 128, 129, 257])),
    seed=seeds,
    extra=st.integers(0, 2),
)
def test_equals_reference(rows: int, columns: int, seed: int, extra: int) -> None:
    random = generator(seed)
    token_ids = torch.randint(-1, 512, (rows, columns), generator=random)
    num_rows = torch.randint(0, columns + 1, (rows,), generator=random)
    following = torch.randint(0, 512, (rows,), generator=random)
    out, _ = compare(shift_append, strided(token_ids, extra), num_rows, following, pad_token_id=7)
    for row, count in enumerate(num_rows.tolist()):
        expected = [*token_ids[row, 1:count].tolist(), int(following[row])] if count else []
        assert out[row].tolist() == expected + [7] * (columns - count)
