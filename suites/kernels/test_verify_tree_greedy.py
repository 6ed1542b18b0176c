"""verify_tree_greedy: the kernel equals the reference; broken links end a walk and never hang it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.verify_tree_greedy import verify_tree_greedy
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.kernels.trees import check_verdict, links, random_links
from suites.registration import suite

suite(seconds=0.5, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=batches,
    num_nodes=st.integers(1, 9),
    max_accept_len=st.integers(1, 7),
    vocab=st.sampled_from([2, 3, 2**40]),
    seed=seeds,
    extra=st.integers(0, 3),
)
def test_equals_reference(rows: int, num_nodes: int, max_accept_len: int, vocab: int, seed: int, extra: int) -> None:
    """Few ids, so that choices are met often, and ids past 32 bits."""
    rng = generator(seed)
    palette = torch.tensor([-1, 0, 1, vocab - 1])
    drafts = palette[torch.randint(0, 4, (rows, num_nodes - 1), generator=rng)]
    choices = palette[torch.randint(1, 4, (rows, num_nodes), generator=rng)]
    args = (drafts, *random_links(rows, num_nodes, seed), choices)
    got, _ = compare(verify_tree_greedy, *(strided(one, extra) for one in args), max_accept_len)
    check_verdict(*got)


def test_walks_by_hand() -> None:
    """Second child, then its first; a choice that no child has; the deepest level; no draft; the first of twins."""
    tree = [0, 0, 2, 2, 3]
    drafts = torch.tensor([[5, 7, 1, 2, 4]] * 4 + [[7, 7, 1, 2, 4]])
    choices = torch.tensor(
        [
            [7, 9, 1, 4, 9, 6],
            [8, 9, 1, 4, 9, 6],
            [7, 9, 2, 4, 9, 6],
            [7, 9, 1, 4, 9, 6],
            [7, 9, 1, 4, 9, 6],
        ]
    )
    next_token, next_sibling = links([tree, tree, tree, [], tree], 6)
    (emitted, accept_lens, accept_index), _ = compare(verify_tree_greedy, drafts, next_token, next_sibling, choices, 4)
    assert emitted.tolist() == [[7, 1, 4, 6], [8, -1, -1, -1], [7, 2, 9, -1], [7, -1, -1, -1], [7, 9, -1, -1]]
    assert accept_lens.tolist() == [4, 1, 3, 1, 2]
    assert accept_index.tolist() == [[0, 2, 3, 5], [0, -1, -1, -1], [0, 2, 4, -1], [0, -1, -1, -1], [0, 1, -1, -1]]


def test_no_walk_is_longer_than_asked_for() -> None:
    drafts, choices = torch.tensor([[3, 4, 5]] * 2), torch.tensor([[3, 4, 5, 6]] * 2)
    next_token, next_sibling = links([[0, 1, 2]] * 2, 4)
    for longest in (1, 2, 3):
        got, _ = compare(verify_tree_greedy, drafts, next_token, next_sibling, choices, longest)
        assert got[0].tolist() == [[3, 4, 5][:longest]] * 2
        assert got[1].tolist() == [longest] * 2


def test_a_ring_of_links_ends() -> None:
    drafts, choices = torch.tensor([[3, 4]]), torch.tensor([[9, 9, 9]])
    next_token, next_sibling = torch.tensor([[1, 1, 2]]), torch.tensor([[0, 2, 1]])
    (_, accept_lens, _), _ = compare(verify_tree_greedy, drafts, next_token, next_sibling, choices, 3)
    assert accept_lens.tolist() == [1]


def test_says_what_does_not_fit() -> None:
    drafts, choices = torch.tensor([[3, 4]]), torch.tensor([[9, 9, 9]])
    next_token, next_sibling = links([[0, 1]], 3)
    with pytest.raises(ValueError, match=r"retrieve_next_token\.shape=\[1, 2\]: must be \[1, 3\]"):
        verify_tree_greedy(drafts, next_token[:, 1:], next_sibling, choices, 3, backend="torch")
    with pytest.raises(ValueError, match=r"target_argmax\.dtype=torch\.int32"):
        verify_tree_greedy(drafts, next_token, next_sibling, choices.int(), 3, backend="torch")
    with pytest.raises(ValueError, match="max_accept_len=0"):
        verify_tree_greedy(drafts, next_token, next_sibling, choices, 0, backend="torch")
    with pytest.raises(ValueError, match=r"draft_tokens\.stride\(\)"):
        verify_tree_greedy(drafts.repeat(1, 2)[:, ::2], next_token, next_sibling, choices, 3, backend="triton")
