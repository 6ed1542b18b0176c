"""Compaction equals its reference; what is kept and what is freed are the slots of the window, once each."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.compact_accepted_slots import compact_accepted_slots
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.3, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=batches,
    num_nodes=st.integers(1, 17),
    width=st.integers(1, 9),
    stray=st.booleans(),
    seed=seeds,
    extra=st.integers(0, 2),
)
@example(rows=3, num_nodes=2, width=5, stray=True, seed=1, extra=1)
def test_equals_reference(rows: int, num_nodes: int, width: int, stray: bool, seed: int, extra: int) -> None:
    random = generator(seed)
    slots = torch.randperm(rows * num_nodes, generator=random).view(rows, num_nodes)
    most = width if stray else min(width, num_nodes)
    accept_lens = torch.randint(0, most + 1, (rows,), generator=random)
    order = torch.rand(rows, max(num_nodes, width), generator=random).argsort(1)[:, :width]
    path = order % num_nodes
    if stray:
        path = torch.where(torch.rand(rows, width, generator=random) < 0.2, num_nodes, path)
        path = torch.where(torch.rand(rows, width, generator=random) < 0.2, -1, path)
    path = torch.where(torch.arange(width) < accept_lens[:, None], path, -1)
    (_, target, free), _ = compare(compact_accepted_slots, strided(slots, extra), strided(path, extra), accept_lens)
    if not stray:
        together = torch.cat([target, free], dim=1)
        for row in range(rows):
            assert sorted(together[row][together[row] >= 0].tolist()) == sorted(slots[row].tolist())
