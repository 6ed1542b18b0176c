"""apply_penalties: the kernel equals the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.apply_penalties import apply_penalties, launch, reference
from suites.kernels.guard import compare
from suites.kernels.rows import EDGE_VOCABS, VOCABS, logits, offset_rows
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.4, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


def counts(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Mostly 0, at most 3."""
    return (torch.randint(-3, 4, shape, generator=generator(seed))).clamp(min=0).to(dtype)


def column(rows: int, low: float, high: float, seed: int) -> torch.Tensor:
    return low + (high - low) * torch.rand(rows, generator=generator(seed))


@examples
@given(
    rows=batches,
    queries=st.integers(0, 3),
    vocab=st.sampled_from(VOCABS),
    seed=seeds,
    off=st.sets(st.integers(0, 2)),
    dtype=st.sampled_from([torch.float32, torch.long, torch.int32]),
    extra=st.integers(0, 3),
)
def test_equals_reference(
    rows: int, queries: int, vocab: int, seed: int, off: set[int], dtype: torch.dtype, extra: int
) -> None:
    shape = rows, queries, vocab
    wide = logits(shape, seed), counts(shape, seed + 1, dtype), counts(shape, seed + 2, dtype)
    limits = (0.5, 2.0), (-2.0, 2.0), (-2.0, 2.0)
    columns = [None if i in off else column(rows, *limits[i], seed + i) for i in range(3)]
    compare(apply_penalties, *(strided(one, extra) for one in wide), *columns)


@pytest.mark.parametrize("vocab", EDGE_VOCABS)
def test_tile_edges(vocab: int) -> None:
    shape = 1, 2, vocab
    columns = torch.tensor([1.3]), torch.tensor([0.4]), torch.tensor([-0.7])
    compare(apply_penalties, logits(shape, 1), counts(shape, 2), counts(shape, 3), *columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    shape = 2, 2, 30
    columns = column(2, 0.5, 2.0, 1), column(2, -1.0, 1.0, 2), None
    got, _ = compare(apply_penalties, logits(shape, 4).to(dtype), counts(shape, 5), counts(shape, 6), *columns)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_penalties_by_hand() -> None:
    """Repetition 2 on a positive, a negative and an unseen token; then 0.5 a count, then 0.25 once."""
    raw = torch.tensor([[[4.0, -4.0, 4.0, 1.0]]])
    prompt, output = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), torch.tensor([[[0.0, 2.0, 0.0, 3.0]]])
    columns = torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.25])
    got, _ = compare(apply_penalties, raw, prompt, output, *columns)
    assert got.tolist() == [[[2.0, -9.25, 4.0, -1.25]]]


def test_the_same_counts_for_all_rows_may_be_expanded(device: torch.device) -> None:
    shape = 2, 3, 20
    prompt, output = (counts((2, 1, 20), seed).to(device).expand(shape) for seed in (1, 2))
    args = logits(shape, 3).to(device), prompt, output, *(column(2, 0.5, 1.5, seed).to(device) for seed in range(3))
    torch.testing.assert_close(launch(*args), reference(*args), rtol=0, atol=0, equal_nan=True)


def test_offsets_past_31_bits(device: torch.device) -> None:
    raw = offset_rows(logits((3, 1, 8), 3, hostile=False).half(), device)
    columns = (column(3, 0.5, 1.5, seed).to(device) for seed in range(3))
    args = raw, counts((3, 1, 8), 1).to(device), counts((3, 1, 8), 2).to(device), *columns
    assert torch.equal(launch(*args), reference(*args))


def test_says_what_does_not_fit() -> None:
    shape = 2, 1, 10
    raw, prompt, output = logits(shape, 0), counts(shape, 1), counts(shape, 2)
    with pytest.raises(ValueError, match=r"output_counts\.shape=\[2, 1, 9\]: must be \[2, 1, 10\]"):
        apply_penalties(raw, prompt, output[..., 1:], None, None, None, backend="torch")
    with pytest.raises(ValueError, match=r"presence\.shape=\[3\]: must be \[2\]"):
        apply_penalties(raw, prompt, output, None, None, torch.ones(3), backend="torch")
    with pytest.raises(ValueError, match=r"prompt_counts\.dtype=torch\.bool"):
        apply_penalties(raw, prompt.bool(), output, None, None, None, backend="torch")
