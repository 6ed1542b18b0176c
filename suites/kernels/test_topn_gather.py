"""topn_gather: ids equal the reference, logprobs to one float32 ulp."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.topn_gather import launch, reference, topn_gather
from suites.kernels.guard import compare
from suites.kernels.rows import EDGE_VOCABS, VOCABS, logits, offset_rows
from suites.kernels.support import examples, seeds, strided
from suites.registration import suite

suite(seconds=1, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")

ULP = 2.0**-23


@examples
@given(
    rows=st.integers(0, 4),
    places=st.integers(0, 2),
    vocab=st.sampled_from(VOCABS),
    num_top=st.integers(0, 6),
    seed=seeds,
    extra=st.integers(0, 3),
)
def test_equals_reference(rows: int, places: int, vocab: int, num_top: int, seed: int, extra: int) -> None:
    raw = logits((rows, places, vocab), seed)
    (ids, logprobs), _ = compare(topn_gather, strided(raw, extra), num_top, rtol=ULP)
    assert torch.equal(ids >= 0, (torch.arange(num_top) < vocab).expand(ids.shape).to(ids.device))
    assert (ids < vocab).all()
    assert not logprobs.isnan().any()


@pytest.mark.parametrize("vocab", EDGE_VOCABS)
def test_tile_edges(vocab: int) -> None:
    """The two best are in the last lanes; the row of equals ends in the first tile."""
    raw = logits((2, 1, vocab), vocab, hostile=False)
    raw[0, 0, -2:] = 50.0
    raw[1] = 0.0
    compare(topn_gather, raw, 3, rtol=ULP)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    compare(topn_gather, logits((3, 2, 30), 4).to(dtype), 4, rtol=ULP)


def test_by_hand() -> None:
    """Equals by id; NaN is least; two more than there are."""
    raw = torch.tensor([[[1.0, 2.0, torch.nan, 1.0]]]) * 0.6931471805599453
    (ids, logprobs), _ = compare(topn_gather, raw, 6, rtol=ULP)
    assert ids.tolist() == [[[1, 0, 3, 2, -1, -1]]]
    half = torch.tensor(0.5).log().item()
    torch.testing.assert_close(
        logprobs.cpu(), torch.tensor([[[half, 2 * half, 2 * half, -torch.inf, -torch.inf, -torch.inf]]])
    )


def test_offsets_past_31_bits(device: torch.device) -> None:
    raw = offset_rows(logits((3, 1, 8), 3, hostile=False).half(), device)
    (ids, logprobs), (right_ids, right) = launch(raw, 3), reference(raw, 3)
    torch.testing.assert_close(logprobs, right, rtol=ULP, atol=0)
    assert torch.equal(ids, right_ids)


def test_says_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"logits\.shape=\[2, 10\]: must be \[any, any, any\]"):
        topn_gather(logits((2, 10), 0), 3, backend="torch")
    with pytest.raises(ValueError, match="num_top=-1"):
        topn_gather(logits((2, 1, 10), 0), -1, backend="torch")
