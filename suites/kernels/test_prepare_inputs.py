"""Padded draft inputs equal their reference, and the indices that they give lie in their request's rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.prepare_inputs import prepare_inputs
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(rows=batches, num_drafts=st.integers(0, 8), seed=seeds)
def test_equals_reference(rows: int, num_drafts: int, seed: int) -> None:
    random = generator(seed)
    drafts = torch.randint(0, num_drafts + 1, (rows,), generator=random)
    sampled = torch.randint(0, num_drafts + 2, (rows,), generator=random).minimum(drafts + 1)
    query_start = torch.cat([torch.zeros(1, dtype=torch.long), (drafts + 1).cumsum(0)])
    (index, rejected), _ = compare(prepare_inputs, drafts.cumsum(0), sampled, query_start)
    index, rejected = index.cpu(), rejected.cpu()
    assert torch.equal(rejected, (drafts + 1 - sampled.clamp(min=1)) * (drafts > 0))
    assert bool(((index >= query_start[:-1]) & (index < query_start[1:])).all())


def test_many_requests() -> None:
    drafts = torch.arange(300) % 4
    query_start = torch.cat([torch.zeros(1, dtype=torch.long), (drafts + 1).cumsum(0)])
    compare(prepare_inputs, drafts.cumsum(0), torch.ones(300, dtype=torch.long), query_start)
