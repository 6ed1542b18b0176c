"""Addresses of the next step equal their reference; at the context limit nothing is written and little is read."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.next_step_slots import next_step_slots
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=batches,
    page_size=st.sampled_from([1, 3, 16]),
    pages=st.integers(0, 4),
    padding=st.integers(0, 3),
    short=st.integers(-3, 3),
    seed=seeds,
    extra=st.integers(0, 2),
)
def test_equals_reference(
    rows: int, page_size: int, pages: int, padding: int, short: int, seed: int, extra: int
) -> None:
    random = generator(seed)
    context_length = max(1, pages * page_size + short)
    positions = torch.randint(-1, context_length + 1, (rows,), generator=random)
    at_limit = context_length - torch.randint(0, 3, (rows,), generator=random)
    positions = torch.where(torch.rand(rows, generator=random) < 0.5, at_limit, positions)
    seq_lens = torch.randint(0, context_length + 1, (rows,), generator=random)
    table = torch.randint(0, 50, (rows, pages), generator=random)
    (position, slots, lens), _ = compare(
        next_step_slots,
        positions,
        seq_lens,
        strided(table, extra),
        page_size,
        context_length,
        num_padded=rows + padding,
        pad_slot=-1,
    )
    past = positions + 1 >= context_length
    assert bool((slots.cpu()[:rows][past] == -1).all())
    assert bool((lens.cpu()[past] == 1).all())
    assert bool((slots[rows:] == -1).all())
    assert bool((position < context_length).all())


def test_more_rows_than_a_tile() -> None:
    table = torch.arange(130 * 2).view(130, 2)
    compare(next_step_slots, torch.arange(130) % 8, torch.arange(130) % 8, table, 4, 8, num_padded=257, pad_slot=0)
