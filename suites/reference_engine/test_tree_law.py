"""Trees: the tokens emitted are exactly as likely as the target says, whatever tree was drafted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import verify_tree_sampled as kernel
from reference_engine.sampling.processors import draw
from reference_engine.verification import tree
from reference_engine.verification.base import Verdict
from suites.reference_engine.laws import (
    TOLERANCE,
    Laws,
    Tally,
    Tokens,
    all_coins,
    check_verdict,
    completed,
    distance,
    seeded_laws,
    target_law,
)
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=3.8, stage="cpu", needs="cpu")

Verify = Callable[..., Verdict]
Tree = tuple[Tokens, Tokens]
"""Tokens of the drafts (-1 = no node) and their parents: 0 is the root, draft j is node j + 1."""

CELLS = 6
"""Masses are multiples of 1/3; with one or two of the three tokens taken out, of 1/2 or 1."""
VOCAB = 3

TREES: dict[str, Tree] = {
    "chain": ((0, 1), (0, 1)),
    "siblings": ((2, 0), (0, 0)),
    "all siblings": ((0, 1, 2), (0, 0, 0)),
    "twins": ((1, 1, 0), (0, 0, 0)),
    "under the second": ((0, 1, 2, 0), (0, 0, 2, 2)),
    "under both": ((0, 1, 2, 0), (0, 0, 1, 2)),
    "interleaved": ((2, 0, 1, 2), (0, 1, 0, 3)),
    "deep": ((1, 2, 0), (0, 1, 2)),
    "no node among nodes": ((1, -1, 0, 2), (0, 0, 0, 1)),
    "no node at all": ((-1, -1), (0, 1)),
}


def links(tokens: torch.Tensor, parents: torch.Tensor) -> tree.Tree:
    return tree.tree_of(tokens, parents, torch.zeros(len(tokens), dtype=torch.long))


def verify_tree_greedy(tokens: torch.Tensor, parents: torch.Tensor, *rest: Any) -> Verdict:
    return tree.verify_tree_greedy(tokens, links(tokens, parents), *rest)


def verify_tree_sampled(tokens: torch.Tensor, parents: torch.Tensor, *rest: Any) -> Verdict:
    return tree.verify_tree_sampled(tokens, links(tokens, parents), *rest)


def paths_of(drafted: Tree) -> list[Tokens]:
    """Tokens from the root to every node, the root included."""
    paths: list[Tokens] = [()]
    for token, parent in zip(*drafted, strict=True):
        paths.append((*paths[parent], max(token, 0)))
    return paths


def law_of(verify: Verify, drafted: Tree, target: Laws, dtype: torch.dtype = torch.float64) -> dict[Tokens, float]:
    """Law of as many tokens as the tree is deep, and one."""
    paths = paths_of(drafted)
    depth = max(map(len, paths)) + 1
    children = [[node for node, parent in enumerate(drafted[1]) if parent == root] for root in range(len(paths))]
    used = [(len(paths[root]), order) for root in range(len(paths)) for order in range(len(children[root]))]
    places = sorted(set(used))
    coins = all_coins([*[CELLS] * len(places), CELLS])
    rows = len(coins)
    siblings = torch.rand(rows, depth, len(drafted[0]), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for column, (level, order) in enumerate(places):
        siblings[:, level, order] = coins[:, column]
    verdict = verify(
        torch.tensor(drafted[0]).expand(rows, -1),
        torch.tensor(drafted[1]).expand(rows, -1),
        torch.tensor([target(path) for path in paths], dtype=dtype).expand(rows, -1, -1),
        siblings,
        coins[:, -1:].expand(-1, depth),
        depth,
    )
    return completed(Tally.of(verdict).masses, target, VOCAB, depth)


def error(verify: Verify, drafted: Tree, seed: int, dtype: torch.dtype = torch.float64) -> float:
    target = seeded_laws(VOCAB, 3, seed)
    depth = max(map(len, paths_of(drafted))) + 1
    return distance(law_of(verify, drafted, target, dtype), target_law(target, VOCAB, depth))


@pytest.mark.parametrize("seed", tiered(range(2), 0))
@pytest.mark.parametrize("name", TREES)
def test_the_law_is_the_targets(name: str, seed: int) -> None:
    assert error(verify_tree_sampled, TREES[name], seed) < TOLERANCE


def test_the_law_in_float32() -> None:
    assert error(verify_tree_sampled, TREES["under both"], 2, torch.float32) < TOLERANCE


def drawn_tree(seed: int, nodes: int) -> Tree:
    """Any tokens, and parents before their children."""
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB) for _ in range(nodes)), tuple(rng.randint(0, node) for node in range(nodes))


@pytest.mark.parametrize("seed", range(8))
def test_any_tree(seed: int) -> None:
    assert error(verify_tree_sampled, drawn_tree(seed, 3), seed) < TOLERANCE


def scaled_coins(factor: float) -> Verify:
    def verify(
        tokens: torch.Tensor, parents: torch.Tensor, p: torch.Tensor, coins: torch.Tensor, *rest: Any
    ) -> Verdict:
        return verify_tree_sampled(tokens, parents, p, coins / factor, *rest)

    return verify


def skewed_law(tokens: torch.Tensor, parents: torch.Tensor, p: torch.Tensor, *rest: Any) -> Verdict:
    """The law after the last node 1% off: a bonus token, or the siblings below it."""
    skewed = torch.cat([p[:, :-1], 0.99 * p[:, -1:] + 0.01 * p[:, -1:].flip(-1)], dim=1)
    return verify_tree_sampled(tokens, parents, skewed, *rest)


def rejected_stay(
    tokens: torch.Tensor, parents: torch.Tensor, p: torch.Tensor, c: torch.Tensor, u: torch.Tensor, d: int
) -> Verdict:
    """Each sibling and the recovered token are weighed against p, as if none had been rejected before."""
    verdict = verify_tree_sampled(tokens, parents, p, c, u, d)
    rows = torch.arange(len(tokens))
    last = verdict.accept_lens - 1
    again = draw(p[rows, verdict.accept_index[rows, last]], u[rows, last], "torch")
    emitted = verdict.emitted.clone()
    emitted[rows, last] = again
    return Verdict(emitted, verdict.accept_lens, verdict.accept_index)


FAULTS: dict[str, Verify] = {
    "ratio 1% up": scaled_coins(1.01),
    "ratio 1% down": scaled_coins(0.99),
    "law of a node 1% off": skewed_law,
    "rejected siblings stay": rejected_stay,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["chain", "siblings", "under both", "deep"])
def test_a_rule_that_is_one_percent_off_is_red(name: str, fault: str) -> None:
    assert any(error(FAULTS[fault], TREES[name], seed) > 100 * TOLERANCE for seed in range(6))


@pytest.mark.parametrize("name", ["siblings", "under both"])
def test_a_residual_that_is_one_percent_off_is_red(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel.draw_of
    monkeypatch.setattr(kernel, "draw_of", lambda p, *rest: right(0.99 * p + 0.01 * p.flip(-1), *rest))
    assert any(error(verify_tree_sampled, TREES[name], seed) > 100 * TOLERANCE for seed in range(6))


def walked(drafted: Tree, choices: list[int]) -> tuple[list[int], list[int]]:
    """What greedy verification must emit, and the nodes on its path."""
    node, emitted, path = 0, [], [0]
    while True:
        emitted.append(choices[node])
        below = (j + 1 for j, parent in enumerate(drafted[1]) if parent == node and drafted[0][j] == choices[node])
        found = next(below, None)
        if found is None:
            return emitted, path
        node = found
        path.append(node)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_trees_follow_the_targets_choice(seed: int) -> None:
    """200 trees of up to six nodes in one batch; a draft of -1 is no node."""
    rng = random.Random(seed)
    trees = [drawn_tree(rng.randrange(10**9), 6) for _ in range(200)]
    trees = [(tuple(-1 if rng.random() < 0.1 else token for token in tokens), parents) for tokens, parents in trees]
    choices = [[rng.randrange(VOCAB) for _ in range(7)] for _ in trees]
    tokens, parents = (torch.tensor([one[part] for one in trees]) for part in (0, 1))
    verdict = verify_tree_greedy(tokens, parents, torch.tensor(choices), 7)
    check_verdict(verdict)
    for row, (drafted, choice) in enumerate(zip(trees, choices, strict=True)):
        length = int(verdict.accept_lens[row])
        got = verdict.emitted[row, :length].tolist(), verdict.accept_index[row, :length].tolist()
        assert got == walked(drafted, choice)
    assert len(set(verdict.accept_lens.tolist())) > 3


def test_nan_never_becomes_an_id() -> None:
    p = torch.full((1, 4, VOCAB), float("nan"))
    coins, final = torch.full((1, 3, 3), 0.1), torch.full((1, 3), 0.9)
    verdict = verify_tree_sampled(torch.tensor([[0, 1, 2]]), torch.tensor([[0, 0, 1]]), p, coins, final, 3)
    check_verdict(verdict)
    assert int(verdict.emitted.max()) < VOCAB
