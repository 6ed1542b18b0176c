"""verify_chain_sampled: the Triton kernel equals the reference, and neither lets a bad row or id through."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.verify_chain_sampled import launch, reference, verify_chain_sampled
from suites.kernels.chains import chain, check_block
from suites.kernels.guard import compare
from suites.kernels.rows import EDGE_VOCABS, VOCABS, offset_rows, probabilities
from suites.kernels.support import examples, seeds, strided
from suites.registration import suite

suite(seconds=0.9, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=st.integers(0, 4),
    k=st.integers(0, 6),
    vocab=st.sampled_from(VOCABS),
    seed=seeds,
    with_probs=st.booleans(),
    extra=st.integers(0, 3),
)
def test_equals_reference(rows: int, k: int, vocab: int, seed: int, with_probs: bool, extra: int) -> None:
    args = chain(rows, k, vocab, seed, with_probs=with_probs)
    got, _ = compare(verify_chain_sampled, *(None if one is None else strided(one, extra) for one in args))
    check_block(args, *(one.cpu() for one in got))


@pytest.mark.parametrize("vocab", EDGE_VOCABS)
def test_tile_edges(vocab: int) -> None:
    args = chain(3, 2, vocab, vocab)
    args[4][0] = 1 - 2.0**-53
    compare(verify_chain_sampled, *args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    drafts, q, p, accept, final = chain(4, 3, 20, 5)
    assert q is not None
    compare(verify_chain_sampled, drafts, q.to(dtype), p.to(dtype), accept.float(), final.float())


def test_rules_by_hand(device: torch.device) -> None:
    """Ratio 1/2; residual on ids 0 and 3 alone; no draft: from p; bonus: from the last row."""
    p = torch.tensor([[0.4, 0.2, 0.1, 0.3], [0.0, 0.0, 1.0, 0.0]], device=device).expand(4, 2, 4)
    q = torch.tensor([[0.1, 0.4, 0.4, 0.1]], device=device).expand(4, 1, 4)
    drafts = torch.tensor([[1], [1], [-1], [4]], device=device)
    accept = torch.tensor([[0.49], [0.51], [0.0], [0.0]], device=device)
    final = torch.tensor([[0.0, 0.0], [0.61, 0.0], [0.61, 0.0], [0.59, 0.0]], device=device)
    for backend in ("torch", "triton"):
        emitted, accept_lens = verify_chain_sampled(drafts, q, p, accept, final, backend=backend)
        assert emitted.tolist() == [[1, 2], [3, -1], [2, -1], [1, -1]]
        assert accept_lens.tolist() == [2, 1, 1, 1]


def test_a_coin_on_the_line_rejects() -> None:
    """Of the draft at p / q = 1/2; and the last token's coin at 1/2 of two equal ids gives the second."""
    p, q = torch.tensor([[[0.25, 0.25, 0.5], [0.5, 0.5, 0.0]]] * 2), torch.tensor([[[0.5, 0.25, 0.25]]] * 2)
    coins = torch.tensor([[0.5], [0.49]])
    args = torch.tensor([[0]] * 2), q, p, coins, torch.full((2, 2), 0.5)
    (emitted, _), _ = compare(verify_chain_sampled, *args)
    assert emitted.tolist() == [[2, -1], [0, 1]]


@pytest.mark.parametrize("p_row", [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [torch.nan] * 3, [torch.inf] * 3, [-1.0] * 3])
def test_an_empty_residual_never_gives_the_rejected_id(p_row: list[float]) -> None:
    """p == q where the draft is unlikely, or nothing is left at all: then the lowest other id."""
    p = torch.tensor([[p_row, p_row]] * 2)
    drafts, accept, final = torch.tensor([[0], [2]]), torch.full((2, 1), 0.5), torch.full((2, 2), 0.9)
    (emitted, _), _ = compare(verify_chain_sampled, drafts, p[:, :1], p, accept, final)
    assert emitted.tolist() == [[1, -1], [1 if p_row[1] == 1.0 else 0, -1]]


def test_draws_from_any_tile() -> None:
    """2500 equal ids: the k-th of them is drawn by a coin between k / 2500 and (k + 1) / 2500."""
    p = torch.full((5, 1, 2500), 1 / 2500)
    final = torch.tensor([[0.2002], [0.4102], [0.5002], [0.8302], [0.9998]])
    (emitted, _), _ = compare(verify_chain_sampled, torch.empty(5, 0).long(), None, p, torch.empty(5, 0), final)
    assert emitted.tolist() == [[500], [1025], [1250], [2075], [2499]]


def test_offsets_past_31_bits(device: torch.device) -> None:
    p = offset_rows(probabilities((3, 2, 8), 3, hostile=False).half(), device)
    accept, final = (torch.full((3, width), 0.4, device=device) for width in (1, 2))
    args = (torch.tensor([[1], [6], [4]], device=device), None, p, accept, final)
    for one, other in zip(launch(*args), reference(*args), strict=True):
        assert torch.equal(one, other)


def test_says_what_does_not_fit() -> None:
    drafts, q, p, accept, final = chain(2, 3, 10, 0)
    with pytest.raises(ValueError, match=r"draft_tokens\.dtype=torch\.int32"):
        verify_chain_sampled(drafts.int(), q, p, accept, final, backend="torch")
    with pytest.raises(ValueError, match=r"target_probs\.shape=\[2, 3, 10\]: must be \[2, 4, any\]"):
        verify_chain_sampled(drafts, q, p[:, 1:], accept, final, backend="torch")
    with pytest.raises(ValueError, match=r"draft_probs\.shape"):
        verify_chain_sampled(drafts, q[..., 1:], p, accept, final, backend="torch")
    with pytest.raises(ValueError, match=r"final_uniform\.dtype=torch\.bfloat16"):
        verify_chain_sampled(drafts, q, p, accept, final.bfloat16(), backend="torch")
    with pytest.raises(ValueError, match="last dim must have stride 1"):
        verify_chain_sampled(drafts, q, p.mT.contiguous().mT, accept, final, backend="triton")
    with pytest.raises(ValueError, match=r"must not be empty"):
        verify_chain_sampled(drafts, None, p[..., :0], accept, final, backend="torch")
