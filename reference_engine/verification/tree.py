"""Verification of draft trees: walk from the root, at each node accept at most one child.

Greedy: the child that equals the target's choice. Sampled: children are tried in order against the target's law with
the rejected ones taken out (recursive rejection sampling for drafts chosen without chance; Miao et al. 2023, EAGLE).
"""

from __future__ import annotations

import torch

from reference_engine.sampling.processors import sample
from reference_engine.verification.base import Verdict


def _child_table(draft_tokens: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For every window node its children in order: ids of nodes [N, n, n - 1] and where they exist. Node 0 is the root,
    draft j is node j + 1; a draft of -1 is no node."""
    num_nodes = draft_tokens.shape[1] + 1
    nodes = torch.arange(num_nodes, device=parents.device)
    is_child = (parents[:, None, :] == nodes[:, None]) & (draft_tokens >= 0)[:, None, :]
    return nodes[1:].expand_as(is_child), is_child


def verify_tree_greedy(
    draft_tokens: torch.Tensor, parents: torch.Tensor, target_argmax: torch.Tensor, max_accept_len: int
) -> Verdict:
    """draft_tokens, parents [N, n - 1]; target_argmax [N, n]: the target's choice after each node."""
    rows = torch.arange(len(draft_tokens), device=draft_tokens.device)
    nodes, is_child = _child_table(draft_tokens, parents)
    walk = _Walk(rows, max_accept_len)
    for _ in range(max_accept_len - 1):
        choice = target_argmax[rows, walk.node]
        matches = is_child[rows, walk.node] & (draft_tokens == choice[:, None])
        walk.descend(matches.any(1), nodes[rows, walk.node, matches.long().argmax(1)], choice)
    return walk.finish(target_argmax[rows, walk.node])


def verify_tree_sampled(
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    target_probs: torch.Tensor,
    sibling_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
    max_accept_len: int,
) -> Verdict:
    """target_probs [N, n, V]; sibling_uniform [N, max_accept_len, siblings]: coin of the i-th child tried at a depth;
    final_uniform [N, max_accept_len]: for the token drawn when the walk ends at that depth. All in [0, 1)."""
    rows = torch.arange(len(draft_tokens), device=draft_tokens.device)
    _, is_child = _child_table(draft_tokens, parents)
    walk = _Walk(rows, max_accept_len)
    law = target_probs[rows, 0]
    for depth in range(max_accept_len - 1):
        children = is_child[rows, walk.node]
        order = children.long().cumsum(1) - 1
        moved = torch.zeros_like(walk.alive)
        target_node, token = walk.node.clone(), walk.node.clone()
        residual = law
        for child in range(draft_tokens.shape[1]):
            trying = children[:, child] & walk.alive & ~moved
            drawn = draft_tokens[:, child].clamp(min=0)
            mass = residual.gather(1, drawn[:, None])[:, 0]
            coin = sibling_uniform[rows, depth, order[:, child].clamp(min=0)]
            accept = trying & (coin * residual.sum(1) < mass)
            target_node = torch.where(accept, child + 1, target_node)
            token = torch.where(accept, drawn, token)
            moved |= accept
            rejected = trying & ~accept
            without = residual.scatter(1, drawn[:, None], 0.0)
            residual = torch.where(rejected[:, None], without, residual)
        walk.descend(moved, target_node, token)
        law = torch.where(moved[:, None], target_probs[rows, target_node], residual)
    depth_at_end = walk.accepted
    return walk.finish(sample(law, final_uniform[rows, depth_at_end]))


class _Walk:
    """The accepted path of every row so far."""

    def __init__(self, rows: torch.Tensor, max_accept_len: int) -> None:
        self.rows = rows
        self.node = torch.zeros_like(rows)
        self.accepted = torch.zeros_like(rows)
        self.alive = torch.ones_like(rows, dtype=torch.bool)
        self.emitted = rows.new_full((len(rows), max_accept_len), -1)
        self.path = rows.new_full((len(rows), max_accept_len), -1)
        self.path[:, 0] = 0

    def descend(self, moved: torch.Tensor, node: torch.Tensor, token: torch.Tensor) -> None:
        """Step to `node` having emitted `token` where `moved`; the other rows end here."""
        self.alive &= moved
        rows = self.rows[self.alive]
        self.emitted[rows, self.accepted[rows]] = token[rows]
        self.accepted[rows] += 1
        self.path[rows, self.accepted[rows]] = node[rows]
        self.node = torch.where(self.alive, node, self.node)

    def finish(self, final: torch.Tensor) -> Verdict:
        self.emitted[self.rows, self.accepted] = final
        return Verdict(self.emitted, self.accepted + 1, self.path)
