"""Trees equal their reference, and a walk over parents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.build_tree import MaskMode, build_tree
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=1.1, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")

MODES: tuple[MaskMode, ...] = ("full", "qlen_only", "packed")


def candidates(rows: int, count: int, random: torch.Generator) -> torch.Tensor:
    """Parents of candidates, each before its children, -1 = root."""
    return (torch.rand(rows, count, generator=random) * (torch.arange(count) + 1)).long() - 1


def ancestors(parents: list[int], node: int) -> list[int]:
    path = [node]
    while node > 0:
        node = parents[node - 1]
        path.append(node)
    return path


@examples
@given(
    rows=batches,
    num_nodes=st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 32, 33])),
    spare=st.integers(0, 4),
    mask_mode=st.sampled_from(MODES),
    broken=st.booleans(),
    seed=seeds,
    extra=st.integers(0, 2),
)
def test_equals_reference(
    rows: int, num_nodes: int, spare: int, mask_mode: MaskMode, broken: bool, seed: int, extra: int
) -> None:
    random = generator(seed)
    count = num_nodes - 1 + spare
    parents = candidates(rows, count, random)
    # Without `broken` every parent is chosen before its children; with it there are holes, orphans and stray ids.
    chosen = torch.arange(num_nodes - 1).repeat(rows, 1)
    if broken:
        chosen = torch.rand(rows, count, generator=random).argsort(1)[:, : num_nodes - 1].sort(1).values
        chosen = torch.where(torch.rand(chosen.shape, generator=random) < 0.1, -1, chosen)
        parents = torch.where(torch.rand(parents.shape, generator=random) < 0.05, count + 3, parents)
    prefix = torch.randint(0, 20, (rows,), generator=random)
    tree, _ = compare(build_tree, strided(parents, extra), strided(chosen, extra), prefix, mask_mode=mask_mode)
    if not broken:
        assert torch.equal(tree.parents.cpu(), parents[:, : num_nodes - 1] + 1)
        for row in range(rows):
            above = (parents[row] + 1).tolist()
            depths = [len(ancestors(above, node)) - 1 for node in range(num_nodes)]
            assert tree.positions[row].tolist() == [int(prefix[row]) + depth for depth in depths]


@pytest.mark.parametrize("mask_mode", MODES)
def test_a_tree_by_hand(mask_mode: MaskMode) -> None:
    """0 -> 1, 2; 1 -> 3; 3 -> 5; 4 has lost its parent, so it is no node."""
    candidate_parents = torch.tensor([[-1, -1, 0, 7, 2, -1, -1, -1]])
    chosen = torch.tensor([[0, 1, 2, 3, 4]])
    tree, _ = compare(build_tree, candidate_parents, chosen, torch.tensor([10]), mask_mode=mask_mode)
    assert tree.parents.tolist() == [[0, 0, 1, -1, 3]]
    assert tree.positions.tolist() == [[10, 11, 11, 12, 10, 13]]
    assert tree.retrieve_index.tolist() == [[0, 1, 2, 3, -1, 5]]
    assert tree.retrieve_next_token.tolist() == [[1, 3, -1, 5, -1, -1]]
    assert tree.retrieve_next_sibling.tolist() == [[-1, 2, -1, -1, -1, -1]]
    sees = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {4}, {0, 1, 3, 5}]
    if mask_mode == "packed":
        assert tree.mask[0, :, 0].tolist() == [sum(1 << node for node in row) for row in sees]
    else:
        window = tree.mask.view(6, 16)[:, 10:] if mask_mode == "full" else tree.mask[0]
        assert window.tolist() == [[node in row for node in range(6)] for row in sees]


def test_bit_31_and_the_word_after_it() -> None:
    chain = torch.arange(-1, 32)[None]
    tree, _ = compare(build_tree, chain, torch.arange(33)[None], torch.tensor([0]), mask_mode="packed")
    assert tree.mask[0, 31].tolist() == [-1, 0]
    assert tree.mask[0, 33].tolist() == [-1, 3]


def test_refuses_trees_that_are_too_large() -> None:
    with pytest.raises(ValueError, match="at most 63 drafts"):
        build_tree(torch.zeros(1, 64).long(), torch.zeros(1, 64).long(), torch.zeros(1).long(), backend="triton")
