"""filter_logits: the kernel, which searches, equals the reference, which sorts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.filter_logits import filter_logits, launch, reference
from suites.kernels.guard import compare
from suites.kernels.rows import VOCABS, logits, offset_rows
from suites.kernels.support import examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=2.9, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")

INF = torch.inf


def columns(rows: int, vocab: int, seed: int) -> list[torch.Tensor]:
    """Temperature, top_k, top_p, min_p; off, extreme and ordinary values in every batch."""

    def pick(values: list[float], shift: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        index = torch.randint(len(values), (rows,), generator=generator(seed + shift))
        return torch.tensor(values, dtype=dtype)[index]

    return [
        pick([0.0, 0.3, 0.7, 1.0, 2.5, 1e-30, INF], 1),
        pick([0, 1, 2, 3, vocab // 2, vocab - 1, vocab, vocab + 7, -1], 2, torch.long),
        pick([1.0, 0.9, 0.5, 0.25, 0.01, 1e-9], 3),
        pick([0.0, 0.05, 0.3, 0.999], 4),
    ]


@settings(examples, max_examples=16)
@given(
    rows=st.integers(0, 2),
    queries=st.integers(0, 1),
    vocab=st.sampled_from(VOCABS),
    seed=seeds,
    off=st.sets(st.integers(1, 3)),
    extra=st.integers(0, 3),
)
def test_equals_reference(rows: int, queries: int, vocab: int, seed: int, off: set[int], extra: int) -> None:
    raw = logits((rows, queries, vocab), seed)
    params = [None if i in off else one for i, one in enumerate(columns(rows, vocab, seed))]
    got, _ = compare(filter_logits, strided(raw, extra), *params)
    alive = (raw.nan_to_num(-INF, INF, -INF) > -INF).any(-1)
    assert torch.equal((got > -INF).any(-1).cpu(), alive)
    assert not got.isnan().any()


@pytest.mark.parametrize("vocab", [1, 1023, 1025])
def test_tile_edges(vocab: int) -> None:
    """Ties cross from one tile to the next, and half of them stay."""
    raw = logits((2, 1, vocab), vocab, hostile=False)
    raw[0] = 0.0
    top_p = torch.tensor([0.5, 0.8])
    got, _ = compare(filter_logits, raw, torch.ones(2), torch.tensor([0, 700]), top_p, None)
    assert int((got[0, 0] == 0).sum()) == (vocab + 1) // 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    got, _ = compare(filter_logits, logits((2, 1, 30), 4).to(dtype), *columns(2, 30, 9))
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def kept(row: list[float], **params: float) -> list[int]:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    columns = [torch.tensor([value]) for value in values.values()]
    got, _ = compare(filter_logits, torch.tensor(row).log().view(1, 1, -1), *columns)
    return (got[0, 0] > -INF).nonzero()[:, 0].tolist()


def test_filters_by_hand() -> None:
    law = [0.1, 0.4, 0.2, 0.2, 0.1]
    assert kept(law, temperature=0.0) == [1]
    assert kept(law, top_k=1) == [1]
    assert kept(law, top_k=2) == [1, 2, 3]
    assert kept(law, top_p=0.39) == [1]
    assert kept(law, top_p=0.41) == [1, 2]
    assert kept(law, top_p=0.61) == [1, 2, 3]
    assert kept(law, top_p=0.81) == [0, 1, 2, 3]
    assert kept(law, top_k=3, top_p=0.74) == [1, 2]
    assert kept(law, min_p=0.49) == [1, 2, 3]
    assert kept(law, min_p=0.51) == [1]
    assert kept(law, temperature=0.5, min_p=0.24) == [1, 2, 3]
    assert kept([0.25] * 4, top_p=0.5) == [0, 1]
    assert kept([0.25] * 4, temperature=0.0) == [0]


def test_limits_by_hand() -> None:
    """On the line a token stays; what is no number filters nothing; a greedy row keeps its token whatever min_p is."""
    law = [0.1, 0.4, 0.2, 0.2, 0.1]
    assert kept(law, min_p=1.0) == [1]
    assert kept(law, temperature=0.0, min_p=2.0) == [1]
    assert kept(law, top_p=0.0) == kept(law, top_p=-1.0) == [1]
    assert kept(law, top_p=torch.nan) == kept(law, top_p=1.5) == kept(law, min_p=torch.nan) == [0, 1, 2, 3, 4]
    assert kept(law, temperature=torch.nan) == kept(law, temperature=-1.0) == [1]


def test_infinite_logits_share_the_law() -> None:
    row = [1.0, INF, 2.0, INF, torch.nan]
    assert kept(row) == kept(row, top_k=1) == kept(row, min_p=0.5) == kept(row, top_p=0.6) == [1, 3]
    assert kept(row, top_p=0.5) == kept(row, temperature=0.0) == [1]


def test_the_softmax_is_the_law(device: torch.device) -> None:
    raw = logits((2, 2, 50), 1, hostile=False).to(device)
    temperature = torch.tensor([0.7, 1.6], device=device)
    got = launch(raw, temperature, *(torch.full((2,), off, device=device) for off in (0, 1.0, 0.0)))
    torch.testing.assert_close(got.softmax(-1), (raw / temperature[:, None, None]).softmax(-1))


def test_offsets_past_31_bits(device: torch.device) -> None:
    raw = offset_rows(logits((3, 1, 8), 3, hostile=False).half(), device)
    args = raw, *(torch.full((3,), off, device=device) for off in (1.0, 0, 1.0, 0.0))
    assert torch.equal(launch(*args), reference(*args))


def test_says_what_does_not_fit() -> None:
    raw = logits((2, 1, 10), 0)
    with pytest.raises(ValueError, match=r"top_k\.dtype=torch\.int32: must be torch\.int64"):
        filter_logits(raw, None, torch.ones(2).int(), None, None, backend="torch")
    with pytest.raises(ValueError, match=r"temperature\.shape=\[3\]: must be \[2\]"):
        filter_logits(raw, torch.ones(3), None, None, None, backend="torch")
    with pytest.raises(ValueError, match="must not be empty"):
        filter_logits(raw[..., :0], None, None, None, None, backend="torch")
