"""Expanded draft inputs equal their reference, and a plain loop over requests."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.copy_and_expand import copy_and_expand
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds
from suites.registration import suite

suite(seconds=0.3, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")

MASK, PAD = 900, 901


def expanded_ids(ids: list[int], following: int, rejected: int, num_slots: int, shift: bool) -> list[int]:
    width = len(ids) + num_slots - int(shift)
    if not ids:
        return [PAD] * width
    kept = ids[int(shift) : len(ids) - rejected] + [following] + [MASK] * (num_slots - 1)
    return kept + [PAD] * (width - len(kept))


@examples
@given(
    rows=batches,
    longest=st.one_of(st.integers(0, 9), st.just(129)),
    num_slots=st.integers(1, 8),
    shift=st.booleans(),
    seed=seeds,
)
def test_equals_reference(rows: int, longest: int, num_slots: int, shift: bool, seed: int) -> None:
    random = generator(seed)
    lens = torch.randint(0, longest + 1, (rows,), generator=random)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lens.cumsum(0)])
    total = int(lens.sum())
    token_ids = torch.randint(0, 512, (total,), generator=random)
    positions = torch.randint(0, 100, (total,), generator=random)
    rejected = (torch.rand(rows, generator=random) * lens).long().clamp(max=8)
    following = torch.randint(0, 512, (rows,), generator=random)
    out, _ = compare(
        copy_and_expand,
        token_ids,
        positions,
        starts,
        rejected,
        following,
        num_slots=num_slots,
        mask_token_id=MASK,
        pad_token_id=PAD,
        shift=shift,
    )
    expected = []
    for row, part in enumerate(token_ids.split(lens.tolist())):
        expected += expanded_ids(part.tolist(), int(following[row]), int(rejected[row]), num_slots, shift)
    assert out.token_ids.tolist() == expected
    sampled = [row for row in out.sample_index.tolist() if row[0] >= 0]
    assert [expected[row[0]] for row in sampled] == following[lens > 0].tolist()
    assert all(expected[index] == MASK for row in sampled for index in row[1:])
    assert out.is_masked.tolist() == [token == MASK for token in expected]
    assert out.is_rejected.tolist() == [token == PAD for token in expected]
