"""Verification of draft trees: walk from the root, at each node accept at most one child. The steps are those of
`kernels.verify_tree_greedy` and `kernels.verify_tree_sampled`, which tell shapes and rules."""

from __future__ import annotations

import torch

from kernels import verify_tree_greedy as greedy
from kernels import verify_tree_sampled as sampled
from kernels.base import Backend
from kernels.build_tree import Tree, build_tree
from reference_engine.verification.base import Verdict


def tree_of(draft_tokens: torch.Tensor, parents: torch.Tensor, roots: torch.Tensor, backend: Backend = "torch") -> Tree:
    """draft_tokens, parents [N, n - 1] (parents as window nodes, 0 = root), roots [N]: positions of the roots -> links,
    positions and mask [N, n, n]. A draft of -1 is no node."""
    places = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    chosen = torch.where(draft_tokens >= 0, places, -1)
    return build_tree(parents - 1, chosen, roots, mask_mode="qlen_only", backend=backend)


def verify_tree_greedy(
    draft_tokens: torch.Tensor, tree: Tree, target_argmax: torch.Tensor, max_accept_len: int, backend: Backend = "torch"
) -> Verdict:
    """draft_tokens [N, n - 1]; target_argmax [N, n]: the target's choice after each node."""
    links = (tree.retrieve_next_token, tree.retrieve_next_sibling)
    return Verdict(*greedy.verify_tree_greedy(draft_tokens, *links, target_argmax, max_accept_len, backend=backend))


def verify_tree_sampled(
    draft_tokens: torch.Tensor,
    tree: Tree,
    target_probs: torch.Tensor,
    sibling_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
    max_accept_len: int,
    backend: Backend = "torch",
) -> Verdict:
    """target_probs [N, n, V]; sibling_uniform [N, max_accept_len, siblings]: coin of the i-th child tried at a depth;
    final_uniform [N, max_accept_len]: for the token drawn when the walk ends at that depth. All in [0, 1)."""
    links = (tree.retrieve_next_token, tree.retrieve_next_sibling)
    coins = (sibling_uniform, final_uniform)
    return Verdict(
        *sampled.verify_tree_sampled(draft_tokens, *links, target_probs, *coins, max_accept_len, backend=backend)
    )
