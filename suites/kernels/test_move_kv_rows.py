"""KV rows move as in the reference, whatever they overlap, and nothing else in the cache changes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.move_kv_rows import move_kv_rows
from suites.kernels.guard import compare
from suites.kernels.support import examples, generator, seeds
from suites.registration import suite

suite(seconds=0.5, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    heads=st.integers(1, 2),
    page_size=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([1, 3, 8]),
    moves=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    layout=st.sampled_from(["plain", "heads inside a slot", "gaps between pages"]),
    seed=seeds,
)
def test_equals_reference(
    heads: int, page_size: int, head_dim: int, moves: int, dtype: torch.dtype, layout: str, seed: int
) -> None:
    random = generator(seed)
    cache = torch.randn(2 * heads, 12 // page_size, page_size, head_dim, generator=random).to(dtype)
    if layout == "heads inside a slot":
        cache = cache.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    elif layout == "gaps between pages":
        cache = torch.nn.functional.pad(cache, (0, 0, 0, 2))[:, :, :page_size]
    source = torch.randint(-1, 13, (moves,), generator=random)
    target = torch.randperm(14, generator=random)[:moves] - 1
    compare(move_kv_rows, cache, source, target)


def test_overlapping_ranges_in_both_directions() -> None:
    cache = torch.arange(2 * 16 * 4, dtype=torch.float32).view(2, 4, 4, 4)
    before = cache.clone().flatten(1, 2)
    for source, target in ((torch.arange(1, 9), torch.arange(8)), (torch.arange(8), torch.arange(1, 9))):
        got, _ = compare(move_kv_rows, cache, source, target)
        assert torch.equal(got.cpu().flatten(1, 2)[:, target], before[:, source])
