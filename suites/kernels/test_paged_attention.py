"""Paged attention agrees with a plain softmax, in decode, extend and tree verify."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_attention import paged_attention
from suites.kernels.guard import DEVICE, compare
from suites.kernels.support import examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.5, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""As the kernel states it, for values around 1."""


def paged(
    rows: int, pages: int, page_size: int, kv_heads: int, head_dim: int, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache in which every request has pages of its own, scattered; and the block table."""
    total = rows * pages + 2
    table = torch.randperm(total, generator=random)[: rows * pages].view(rows, pages)
    return torch.rand(2 * kv_heads, total, page_size, head_dim, generator=random) * 2 - 1, table


@settings(examples, max_examples=15)
@given(
    rows=st.integers(0, 3),
    queries=st.integers(1, 6),
    page_size=st.sampled_from([1, 4, 16]),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([3, 16, 32]),
    length=st.sampled_from([1, 7, 32, 70]),
    window=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=seeds,
    extra=st.integers(0, 1),
)
def test_equals_reference(
    rows: int,
    queries: int,
    page_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    length: int,
    window: bool,
    dtype: torch.dtype,
    seed: int,
    extra: int,
) -> None:
    random = generator(seed)
    pages = -(-length // page_size)
    cache, table = paged(rows, pages, page_size, kv_heads, head_dim, random)
    query = torch.randn(rows * queries, kv_heads * group, head_dim, generator=random).to(dtype)
    positions = torch.randint(-1, pages * page_size, (rows, queries), generator=random)
    options = {}
    if window:
        width = queries + 2
        options["window_start"] = torch.randint(0, max(1, pages * page_size - width + 2), (rows,), generator=random)
        options["window_mask"] = torch.rand(rows, queries, width, generator=random) < 0.5
    compare(
        paged_attention,
        strided(query, extra),
        cache.to(dtype),
        strided(table, extra),
        positions,
        atol=TOLERANCE[dtype],
        **options,
    )


@pytest.mark.parametrize("window", [False, True])
def test_unseen_kv_may_hold_anything(window: bool) -> None:
    random = generator(3)
    cache, table = paged(2, 4, 4, 1, 16, random)
    positions = torch.tensor([[4, 5], [9, 10]])
    options = {}
    if window:
        options = {
            "window_start": torch.tensor([4, 9]),
            "window_mask": torch.tensor([[[1, 0, 0], [1, 1, 0]]] * 2).bool(),
        }
    columns = cache.permute(1, 2, 0, 3)
    for row, seen in enumerate((6, 11)):
        for column in range(seen, 16):
            columns[table[row, column // 4], column % 4] = float("nan")
    query = torch.randn(4, 2, 16, generator=random)
    out, _ = compare(paged_attention, query, cache, table, positions, atol=1e-5, **options)
    assert bool(out.isfinite().all())


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    random = generator(4)
    cache, table = paged(1, 2, 4, 1, 16, random)
    query = torch.randn(2, 1, 16, generator=random)
    out, _ = compare(paged_attention, query, cache, table, torch.tensor([[-1, 3]]), atol=1e-5)
    assert bool((out[0] == 0).all())
    assert bool((out[1] != 0).any())


def test_one_column_copies_its_value() -> None:
    """Heads read the key head that they belong to."""
    cache = torch.zeros(4, 3, 2, 16)
    cache[2:] = torch.arange(2.0)[:, None, None, None] + 5
    query = torch.ones(1, 6, 16)
    out, _ = compare(paged_attention, query, cache, torch.tensor([[2, 1]]), torch.tensor([[2]]), atol=1e-5)
    assert out[0, :, 0].tolist() == [5, 5, 5, 6, 6, 6]


def test_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="kv_heads"):
        paged_attention(
            torch.zeros(1, 3, 16, device=DEVICE),
            torch.zeros(4, 1, 1, 16, device=DEVICE),
            torch.zeros(1, 1, device=DEVICE).long(),
            torch.zeros(1, 1, device=DEVICE).long(),
            backend="triton",
        )
