"""verify_block: the kernel equals the reference, and neither lets a bad row or id through."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.verify_block import launch, reference, verify_block
from suites.kernels.chains import chain, check_block
from suites.kernels.guard import compare
from suites.kernels.rows import EDGE_VOCABS, VOCABS, offset_rows, probabilities
from suites.kernels.support import examples, seeds, strided
from suites.registration import suite

suite(seconds=1.3, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=st.integers(0, 3),
    k=st.integers(0, 6),
    vocab=st.sampled_from(VOCABS),
    seed=seeds,
    with_probs=st.booleans(),
    extra=st.integers(0, 3),
)
def test_equals_reference(rows: int, k: int, vocab: int, seed: int, with_probs: bool, extra: int) -> None:
    args = chain(rows, k, vocab, seed, with_probs=with_probs)
    got, _ = compare(verify_block, *(None if one is None else strided(one, extra) for one in args))
    check_block(args, *(one.cpu() for one in got))


@pytest.mark.parametrize("vocab", EDGE_VOCABS)
def test_tile_edges(vocab: int) -> None:
    args = chain(3, 2, vocab, vocab)
    args[4][0] = 1 - 2.0**-53
    compare(verify_block, *args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    drafts, q, p, accept, final = chain(4, 3, 20, 5)
    assert q is not None
    compare(verify_block, drafts, q.to(dtype), p.to(dtype), accept.float(), final.float())


def test_rules_by_hand() -> None:
    """Ratios 1/2 and 4 make w = 1/2, then 1: a first coin of 0.9 rejects the first draft alone, but not the block."""
    p = torch.tensor([[[0.2, 0.8], [0.8, 0.2], [0.0, 1.0]]])
    q = torch.tensor([[[0.4, 0.6], [0.2, 0.8]]])
    drafts = torch.tensor([[0, 0]])
    (emitted, accept_lens), _ = compare(verify_block, drafts, q, p, torch.tensor([[0.9, 0.9]]), torch.zeros(1, 3))
    assert (emitted.tolist(), accept_lens.tolist()) == ([[0, 0, 1]], [3])


def test_a_shorter_block_passes_by_its_residual() -> None:
    """w_1 = 1/2, R_1 = 0.5 * 0.8 - 0.2 = 0.2 at id 0, h_1 = 0.2 / 0.7; w_2 = 0.5 * 0.2 / 0.8 = 1/8."""
    p = torch.tensor([[[0.2, 0.8], [0.8, 0.2], [0.0, 1.0]]] * 3)
    q = torch.tensor([[[0.4, 0.6], [0.2, 0.8]]] * 3)
    drafts = torch.tensor([[0, 1]] * 3)
    coins = torch.tensor([[0.9, 0.124], [0.285, 0.126], [0.286, 0.126]])
    (emitted, accept_lens), _ = compare(verify_block, drafts, q, p, coins, torch.full((3, 3), 0.5))
    assert emitted.tolist() == [[0, 1, 1], [0, 0, -1], [1, -1, -1]]
    assert accept_lens.tolist() == [3, 2, 1]


def test_a_coin_on_the_line_rejects() -> None:
    """w_1 = 3/4 and R_1 = 3/4 - 1/2, so h_1 = 1/4 / (1/4 + 1/4); then a whole block of one draft, w_1 = h_1 = 3/4."""
    p = torch.tensor([[[0.375, 0.625], [1.0, 0.0], [1.0, 0.0]]] * 2)
    q = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]] * 2)
    coins = torch.tensor([[0.5, 0.0], [0.49, 0.0]])
    (_, accept_lens), _ = compare(verify_block, torch.tensor([[0, 1]] * 2), q, p, coins, torch.zeros(2, 3))
    assert accept_lens.tolist() == [1, 2]
    coins = torch.tensor([[0.75], [0.74]])
    whole = torch.tensor([[0]] * 2), q[:, :1], p[:, :2], coins, torch.zeros(2, 2)
    (_, accept_lens), _ = compare(verify_block, *whole)
    assert accept_lens.tolist() == [1, 2]


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, -1.0])
def test_rows_without_mass_never_give_the_rejected_id(value: float) -> None:
    p = torch.full((2, 3, 3), value)
    drafts, coins, final = torch.tensor([[0, 1], [2, 0]]), torch.full((2, 2), 0.5), torch.full((2, 3), 0.9)
    (emitted, _), _ = compare(verify_block, drafts, p[:, :2], p, coins, final)
    assert emitted.tolist() == [[1, -1, -1], [0, -1, -1]]


def test_offsets_past_31_bits(device: torch.device) -> None:
    p = offset_rows(probabilities((3, 2, 8), 3, hostile=False).half(), device)
    accept, final = (torch.full((3, width), 0.4, device=device) for width in (1, 2))
    args = (torch.tensor([[1], [6], [4]], device=device), None, p, accept, final)
    for one, other in zip(launch(*args), reference(*args), strict=True):
        assert torch.equal(one, other)


def test_says_what_does_not_fit() -> None:
    drafts, q, p, accept, final = chain(2, 3, 10, 0)
    with pytest.raises(ValueError, match=r"draft_tokens\.dtype=torch\.int32"):
        verify_block(drafts.int(), q, p, accept, final, backend="torch")
    with pytest.raises(ValueError, match=r"accept_uniform\.shape=\[2, 4\]: must be \[2, 3\]"):
        verify_block(drafts, q, p, final, final, backend="torch")
