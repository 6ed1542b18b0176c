"""Greedy chain verification equals its reference."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.verify_chain_greedy import verify_chain_greedy
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(rows=batches, num_drafts=st.integers(0, 8), seed=seeds, extra=st.integers(0, 3))
def test_equals_reference(rows: int, num_drafts: int, seed: int, extra: int) -> None:
    random = generator(seed)
    target = torch.randint(0, 3, (rows, num_drafts + 1), generator=random)
    draft = torch.randint(-1, 3, (rows, num_drafts), generator=random)
    agree = torch.rand(rows, num_drafts, generator=random) < 0.7
    draft = torch.where(agree, target[:, :-1], draft)
    compare(verify_chain_greedy, strided(draft, extra), strided(target, extra))
