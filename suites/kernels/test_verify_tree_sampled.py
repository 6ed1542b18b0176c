"""verify_tree_sampled: the kernel equals the reference, and neither lets a bad row, id or link through."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.verify_tree_sampled import launch, reference, verify_tree_sampled
from suites.kernels.guard import compare
from suites.kernels.rows import EDGE_VOCABS, VOCABS, offset_rows, probabilities, uniforms
from suites.kernels.support import examples, generator, seeds, strided
from suites.kernels.trees import check_verdict, links, random_links
from suites.registration import suite

suite(seconds=2.3, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")

Args = tuple[torch.Tensor, ...]


def tree(rows: int, num_nodes: int, depth: int, coins: int, vocab: int, seed: int) -> Args:
    """Drafts with -1 and ids outside the vocabulary among them, and likely ones: so that walks get somewhere, many
    rows have one law at all nodes, drafts are among its first three, and coins are low."""
    rng = generator(seed)
    p = probabilities((rows, num_nodes, vocab), seed)
    p = torch.where(torch.rand(rows, 1, 1, generator=rng) < 0.6, p[:, :1], p)
    drafts = torch.randint(-1, vocab + 1, (rows, num_nodes - 1), generator=rng)
    ranked = p[:, :-1].nan_to_num(0).argsort(dim=-1, descending=True)
    rank = torch.randint(min(3, vocab), (*drafts.shape, 1), generator=rng)
    drafts = torch.where(torch.rand(drafts.shape, generator=rng) < 0.6, ranked.gather(2, rank)[..., 0], drafts)
    tries = uniforms((rows, depth, coins), seed + 1)
    tries = torch.where(torch.rand(tries.shape, generator=rng) < 0.5, 0.2 * tries, tries)
    numbers = tries, uniforms((rows, depth), seed + 2)
    return drafts, *random_links(rows, num_nodes, seed), p, *numbers


@examples
@given(
    rows=st.integers(0, 6),
    num_nodes=st.integers(1, 8),
    depth=st.integers(1, 5),
    coins=st.integers(0, 4),
    vocab=st.sampled_from(VOCABS),
    seed=seeds,
    extra=st.integers(0, 3),
)
def test_equals_reference(rows: int, num_nodes: int, depth: int, coins: int, vocab: int, seed: int, extra: int) -> None:
    args = tree(rows, num_nodes, depth, coins, vocab, seed)
    got, _ = compare(verify_tree_sampled, *(strided(one, extra) for one in args), depth)
    check_verdict(*got)
    assert (got[0] < vocab).all()


@pytest.mark.parametrize("seed", [1, 3, 5])
@pytest.mark.parametrize("vocab", [3, 5])
def test_walks_that_get_somewhere(vocab: int, seed: int) -> None:
    """Trees of up to 8 nodes, of which a third or so have drafts that are accepted."""
    args = tree(16, 8, 5, 4, vocab, seed)
    got, _ = compare(verify_tree_sampled, *(strided(one, seed) for one in args), 5)
    check_verdict(*got)
    assert int((got[1] > 1).sum()) >= 5


@pytest.mark.parametrize("vocab", EDGE_VOCABS)
def test_tile_edges(vocab: int) -> None:
    args = tree(2, 4, 3, 3, vocab, vocab)
    args[-1][0] = 1 - 2.0**-53
    compare(verify_tree_sampled, *args, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    *topology, p, coins, final = tree(3, 5, 3, 3, 20, 4)
    compare(verify_tree_sampled, *topology, p.to(dtype), coins.float(), final.float(), 3)


def test_rules_by_hand() -> None:
    """Siblings 0 and 1 with masses 0.5 and 0.3: the second is weighed against what the first left, 0.3 / 0.5."""
    p = torch.tensor([[[0.5, 0.3, 0.2, 0.0]] * 3] * 5)
    drafts = torch.tensor([[0, 1]] * 4 + [[0, 0]])
    next_token, next_sibling = links([[0, 0]] * 5, 3)
    coins = torch.tensor([[0.49, 0.0], [0.51, 0.59], [0.51, 0.61], [0.51, 0.61], [0.51, 0.0]])[:, None].repeat(1, 2, 1)
    final = torch.tensor([[0.9, 0.81], [0.9, 0.81], [0.0, 0.0], [0.99, 0.0], [0.61, 0.0]])
    got, _ = compare(verify_tree_sampled, drafts, next_token, next_sibling, p, coins, final, 2)
    emitted, accept_lens, accept_index = got
    assert emitted.tolist() == [[0, 2], [1, 2], [2, -1], [2, -1], [2, -1]]
    assert accept_lens.tolist() == [2, 2, 1, 1, 1]
    assert accept_index.tolist() == [[0, 1], [0, 2], [0, -1], [0, -1], [0, -1]]


@pytest.mark.parametrize("token", [-1, 3, 4])
def test_what_is_no_node_is_passed_over_and_uses_up_no_coin(token: int) -> None:
    """Not even where memory holds a mass for its id."""
    storage = torch.ones(1, 3, 5)
    p = storage[..., 1:4]
    p[:] = torch.tensor([0.5, 0.25, 0.25])
    next_token, next_sibling = links([[0, 0]], 3)
    coins = torch.tensor([[[0.4, 0.9]] * 2])
    args = torch.tensor([[token, 0]]), next_token, next_sibling, p, coins, torch.zeros(1, 2), 2
    (emitted, _, accept_index), _ = compare(verify_tree_sampled, *args)
    assert (emitted.tolist(), accept_index.tolist()) == ([[0, 0]], [[0, 2]])


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_each_depth_has_coins_of_its_own(extra: int) -> None:
    """On a chain of three the first two coins accept and the third rejects."""
    p = torch.tensor([[[0.5, 0.5]] * 4] * 2)
    next_token, next_sibling = links([[0, 1, 2]] * 2, 4)
    coins = torch.tensor([[[0.4, 0.9], [0.3, 0.8], [0.7, 0.1], [0.0, 0.0]]] * 2)
    drafts, final = torch.zeros(2, 3).long(), torch.zeros(2, 4)
    args = (strided(one, extra) for one in (drafts, next_token, next_sibling, p, coins, final))
    (emitted, accept_lens, _), _ = compare(verify_tree_sampled, *args, 4)
    assert emitted.tolist() == [[0, 0, 1, -1]] * 2
    assert accept_lens.tolist() == [3, 3]


def test_a_coin_on_the_line_rejects() -> None:
    """Lines at 0.5, and at 0.25 / 0.5 for the second child."""
    p = torch.tensor([[[0.5, 0.25, 0.25]] * 3] * 2)
    next_token, next_sibling = links([[0, 0]] * 2, 3)
    coins, final = torch.full((2, 2, 2), 0.5), torch.zeros(2, 2)
    coins[0, 0, 1] = 0.49
    drafts = torch.tensor([[0, 1]] * 2)
    (emitted, _, _), _ = compare(verify_tree_sampled, drafts, next_token, next_sibling, p, coins, final, 2)
    assert emitted.tolist() == [[1, 0], [2, -1]]


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, -1.0])
def test_nothing_left_gives_the_lowest_id_that_was_not_rejected(value: float) -> None:
    p = torch.full((2, 3, 3), value)
    p[1, :, 0] = 1.0
    next_token, next_sibling = links([[0, 0]] * 2, 3)
    drafts = torch.tensor([[0, 1], [1, 2]])
    coins, final = torch.full((2, 2, 2), 0.5), torch.full((2, 2), 0.9)
    (emitted, _, _), _ = compare(verify_tree_sampled, drafts, next_token, next_sibling, p, coins, final, 2)
    assert emitted.tolist() == [[2, -1], [0, -1]]


def test_draws_from_any_tile() -> None:
    """2500 equal ids, of which the first two were rejected."""
    p = torch.full((4, 3, 2500), 1 / 2500)
    next_token, next_sibling = links([[0, 0]] * 4, 3)
    drafts, coins = torch.tensor([[0, 1]] * 4), torch.full((4, 2, 2), 0.9)
    final = torch.tensor([[0.0], [0.41], [0.83], [0.9997]]).repeat(1, 2)
    (emitted, _, _), _ = compare(verify_tree_sampled, drafts, next_token, next_sibling, p, coins, final, 2)
    assert emitted[:, 0].tolist() == [2, 1026, 2075, 2499]


def test_offsets_past_31_bits(device: torch.device) -> None:
    p = offset_rows(probabilities((3, 2, 8), 3, hostile=False).half(), device)
    next_token, next_sibling = (one.to(device) for one in links([[0]] * 3, 2))
    coins, final = torch.full((3, 2, 1), 0.3, device=device), torch.full((3, 2), 0.6, device=device)
    args = (torch.tensor([[1], [6], [4]], device=device), next_token, next_sibling, p, coins, final, 2)
    for one, other in zip(launch(*args), reference(*args), strict=True):
        assert torch.equal(one, other)


def test_says_what_does_not_fit() -> None:
    *topology, p, coins, final = tree(2, 4, 3, 3, 10, 1)
    with pytest.raises(ValueError, match=r"target_probs\.shape=\[2, 3, 10\]: must be \[2, 4, any\]"):
        verify_tree_sampled(*topology, p[:, 1:], coins, final, 3, backend="torch")
    with pytest.raises(ValueError, match=r"sibling_uniform\.shape=\[2, 3, 3\]: must be \[2, 2, any\]"):
        verify_tree_sampled(*topology, p, coins, final, 2, backend="torch")
    with pytest.raises(ValueError, match=r"final_uniform\.dtype=torch\.float16"):
        verify_tree_sampled(*topology, p, coins, final.half(), 3, backend="torch")
    with pytest.raises(ValueError, match="last dim must have stride 1"):
        verify_tree_sampled(*topology, p.mT.contiguous().mT, coins, final, 3, backend="triton")
