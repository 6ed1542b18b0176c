"""Draft trees: grown from a drafter whose law is a table, and held against all paths that the table allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.drafters.tree import TreeBuilder
from reference_engine.pool import PLACEHOLDER
from suites.registration import suite

suite(seconds=0.3, stage="cpu", needs="cpu")

Path = tuple[int, ...]


def table(vocab: int, seed: int, *, levels: int = 0) -> torch.Tensor:
    """Logits [vocab + 1, vocab] of the next token after each token, the last row after none. With `levels`, only so
    many different values, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab + 1, vocab, generator=generator, dtype=torch.float64)
    return (logits * levels).round() / levels if levels else logits


def grow(
    logits: torch.Tensor, topk: int, num_steps: int, to_target: Callable[[torch.Tensor], torch.Tensor]
) -> TreeBuilder:
    """A tree of one request. The features of a node are its token, to see that they go the same way."""
    vocab = logits.shape[1]
    tree = TreeBuilder(logits[vocab][None], torch.full((1, 1), -1.0), topk, num_steps, to_target)
    for step in range(1, num_steps):
        mask = tree.window_mask(step)
        assert mask.shape == (1, topk, topk * (num_steps - 1))
        here = from_target(tree.tokens)
        tree.expand(logits[here], here[:, :, None].double(), step)
    return tree


def from_target(tokens: torch.Tensor) -> torch.Tensor:
    return tokens - OFFSET


OFFSET = 3
"""Target id = draft id + 3."""


def identity(ids: torch.Tensor) -> torch.Tensor:
    return ids + OFFSET


def paths(tokens: list[int], parents: list[int]) -> list[Path]:
    """Tokens from the root to every node but the root."""
    found: list[Path] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


def best_paths(logits: torch.Tensor, topk: int, num_steps: int) -> dict[Path, float]:
    """What EAGLE-2 grows: every step expands the topk best nodes of the newest level by their topk best children."""
    laws = logits.log_softmax(-1)
    vocab = logits.shape[1]

    def children(path: Path, score: float) -> list[tuple[float, Path]]:
        law = laws[path[-1] - OFFSET if path else vocab]
        best = sorted(range(vocab), key=lambda token: (-float(law[token]), token))[:topk]
        return [(score + float(law[token]), (*path, token + OFFSET)) for token in best]

    level = children((), 0.0)
    grown = {path: score for score, path in level}
    for _ in range(1, num_steps):
        frontier = sorted(level, key=lambda node: -node[0])[:topk]
        level = list(itertools.chain.from_iterable(children(path, score) for score, path in frontier))
        grown |= {path: score for score, path in level}
    return grown


SHAPES = st.integers(2, 3).flatmap(
    lambda topk: st.tuples(st.just(topk), st.integers(1, 3)).flatmap(
        lambda shape: st.tuples(
            st.just(shape[0]), st.just(shape[1]), st.integers(1, shape[0] + (shape[1] - 1) * shape[0] ** 2)
        )
    )
)


@settings(max_examples=60)
@given(shape=SHAPES, seed=st.integers(0, 999))
def test_the_best_nodes_are_kept_parents_first(shape: tuple[int, int, int], seed: int) -> None:
    topk, num_steps, count = shape
    logits = table(5, seed)
    tokens, parents = (part[0].tolist() for part in grow(logits, topk, num_steps, identity).select(count))
    assert all(parent <= node for node, parent in enumerate(parents)), "a node comes before its parent"
    grown = best_paths(logits, topk, num_steps)
    best = sorted(grown, key=lambda path: -grown[path])[:count]
    assert sorted(paths(tokens, parents)) == sorted(best)


@settings(max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 999))
def test_equal_scores_do_not_part_a_child_from_its_parent(shape: tuple[int, int, int], seed: int) -> None:
    """Certain children (probability one) score exactly what their parent does."""
    topk, num_steps, count = shape
    logits = table(5, seed, levels=1)
    logits[:5] = -torch.inf
    logits[torch.arange(5), torch.arange(5).roll(1)] = 0.0
    tokens, parents = (part[0].tolist() for part in grow(logits, topk, num_steps, identity).select(count))
    assert all(parent <= node for node, parent in enumerate(parents))
    for node, parent in enumerate(parents):
        if parent and tokens[node] != PLACEHOLDER:
            assert tokens[parent - 1] != PLACEHOLDER
            assert (tokens[parent - 1] - OFFSET - 1) % 5 == tokens[node] - OFFSET


@pytest.mark.parametrize(("vocab", "topk"), [(1, 3), (2, 3), (2, 4)])
def test_a_draft_vocabulary_smaller_than_topk(vocab: int, topk: int) -> None:
    """There are not topk tokens to branch into: what is missing is no draft, and no path comes twice."""
    num_steps = 3
    count = topk + (num_steps - 1) * topk**2
    tokens, parents = grow(table(vocab, 1), topk, num_steps, identity).select(count)
    real = [path for path in paths(tokens[0].tolist(), parents[0].tolist()) if PLACEHOLDER not in path]
    assert len(set(real)) == len(real)
    assert {len(path) for path in real} == {1, 2, 3}
    drafted = tokens[tokens != PLACEHOLDER]
    assert int(drafted.min()) >= OFFSET
    assert int(drafted.max()) < vocab + OFFSET


def test_the_frontier_sees_its_ancestors_and_itself() -> None:
    """Scratch position (step - 1) * topk + b holds the b-th node fed at a step; its row of the mask is its own path."""
    topk, num_steps, vocab = 2, 4, 5
    logits = table(vocab, 7)
    tree = TreeBuilder(logits[vocab][None], torch.zeros(1, 1), topk, num_steps, identity)
    fed: list[int] = []
    for step in range(1, num_steps):
        mask = tree.window_mask(step)[0]
        fed += tree.tokens[0].tolist()
        for row in range(topk):
            seen = torch.nonzero(mask[row]).flatten().tolist()
            assert [place // topk for place in seen] == list(range(step))
            assert seen[-1] == (step - 1) * topk + row
            assert tuple(fed[place] for place in seen) in best_paths(logits, topk, step)
        here = from_target(tree.tokens)
        tree.expand(logits[here], here[:, :, None].double(), step)


def test_features_follow_their_parents() -> None:
    logits = table(5, 3)
    tree = TreeBuilder(logits[5][None], torch.full((1, 1), 77.0), 3, 3, identity)
    assert tree.features.flatten().tolist() == [77.0] * 3
    here = from_target(tree.tokens)
    fed = here[0].tolist()
    tree.expand(logits[here], here[:, :, None].double(), 1)
    best = best_paths(logits, 3, 2)
    for token, feature in zip(tree.tokens[0].tolist(), tree.features[0, :, 0].tolist(), strict=True):
        assert int(feature) in fed
        assert (int(feature) + OFFSET, token) in best


def test_requests_of_a_batch_grow_trees_of_their_own() -> None:
    tables = [table(5, seed) for seed in (1, 2, 3)]
    roots, features = torch.stack([one[5] for one in tables]), torch.zeros(3, 1)
    together = TreeBuilder(roots, features, 2, 2, identity)
    here = from_target(together.tokens)
    together.expand(
        torch.stack([one[row] for one, row in zip(tables, here, strict=True)]), here[:, :, None].double(), 1
    )
    tokens, parents = together.select(5)
    for row, one in enumerate(tables):
        alone = grow(one, 2, 2, identity).select(5)
        assert torch.equal(tokens[row], alone[0][0])
        assert torch.equal(parents[row], alone[1][0])
