"""KV indices of draft steps equal their reference, and a plain loop over steps and branches."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.draft_kv_indices import draft_kv_indices
from suites.kernels.guard import compare
from suites.kernels.support import examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.5, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=st.integers(0, 4),
    num_steps=st.integers(1, 4),
    topk=st.integers(1, 3),
    page_size=st.sampled_from([1, 2, 4, 16]),
    width=st.sampled_from([12, 60, 300]),
    slack=st.integers(-1, 2),
    seed=seeds,
    extra=st.integers(0, 2),
)
def test_equals_reference(
    rows: int, num_steps: int, topk: int, page_size: int, width: int, slack: int, seed: int, extra: int
) -> None:
    random = generator(seed)
    table = torch.randperm(5 * width, generator=random).view(5, width)
    request_rows = torch.randperm(5, generator=random)[:rows]
    seq_lens = torch.randint(0, width // 2 + 1, (rows,), generator=random)
    capacity = max(0, topk * (int(seq_lens.sum()) + rows * num_steps) + slack)
    (indices, indptr), _ = compare(
        draft_kv_indices,
        strided(table, extra),
        request_rows,
        seq_lens,
        num_steps=num_steps,
        topk=topk,
        page_size=page_size,
        capacity=capacity,
    )
    for step in range(num_steps):
        runs: list[list[int]] = []
        for row, seq_len in zip(request_rows.tolist(), seq_lens.tolist(), strict=True):
            pages = -(-(seq_len % page_size + num_steps) // page_size)
            for branch in range(topk):
                start = seq_len + branch * pages * page_size
                entries = [*range(seq_len), *range(start, start + step + 1)]
                runs.append([int(table[row, entry]) if entry < width else -1 for entry in entries])
        flat = [slot for run in runs for slot in run]
        assert indices[step].tolist() == (flat + [-1] * capacity)[:capacity]
        assert indptr[step].diff().tolist() == [len(run) for run in runs]
