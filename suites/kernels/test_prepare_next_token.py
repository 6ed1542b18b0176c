"""The next token of each request equals its reference, and is never an id outside the vocabulary."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.prepare_next_token import prepare_next_token
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=batches, width=st.integers(1, 9), vocab_size=st.sampled_from([1, 5, 512]), seed=seeds, extra=st.integers(0, 2)
)
def test_equals_reference(rows: int, width: int, vocab_size: int, seed: int, extra: int) -> None:
    random = generator(seed)
    sampled = torch.randint(-2, vocab_size + 2, (rows, width), generator=random)
    count = torch.randint(0, width + 1, (rows, 1), generator=random)
    sampled = torch.where(torch.arange(width) < count, sampled, -1)
    discard = torch.rand(rows, generator=random) < 0.3
    backup = torch.randint(0, vocab_size, (rows,), generator=random)
    (token, num_valid), _ = compare(prepare_next_token, strided(sampled, extra), discard, backup, vocab_size)
    assert bool(((token >= 0) & (token < vocab_size)).all())
    assert bool((num_valid.cpu()[discard] == 0).all())


def test_two_tokens_were_committed() -> None:
    """The second of two counts, wherever the first stands."""
    sampled = torch.tensor([[15, -1], [15, 18], [15, 15], [0, -1], [3, 4]])
    discard = torch.tensor([False, False, False, False, True])
    (token, num_valid), _ = compare(prepare_next_token, sampled, discard, torch.full((5,), 9), 20)
    assert token.tolist() == [15, 18, 15, 0, 9]
    assert num_valid.tolist() == [1, 2, 2, 1, 0]
