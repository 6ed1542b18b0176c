"""Bonus tokens equal their reference."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.fill_bonus_tokens import fill_bonus_tokens
from suites.kernels.guard import compare
from suites.kernels.support import examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(rows=st.sampled_from([0, 1, 2, 8, 129]), width=st.integers(1, 9), seed=seeds, extra=st.integers(0, 8))
def test_equals_reference(rows: int, width: int, seed: int, extra: int) -> None:
    random = generator(seed)
    accept_lens = torch.randint(0, width + 2, (rows,), generator=random)
    tokens = torch.randint(0, 512, (rows, width), generator=random)
    tokens = torch.where(torch.arange(width) < accept_lens[:, None], tokens, -1)
    bonus, _ = compare(fill_bonus_tokens, strided(tokens, extra), accept_lens)
    usual = (accept_lens >= 1) & (accept_lens <= width)
    assert torch.equal(bonus.cpu() >= 0, usual)
