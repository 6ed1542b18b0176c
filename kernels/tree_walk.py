"""What verification of trees takes: checks of the tensors, and links that cannot lead astray.

A window of n nodes: node 0 is the root (the last committed token), draft j is node j + 1. `retrieve_next_token` [N, n]
is each node's first child, `retrieve_next_sibling` [N, n] its next sibling; -1 = none, and so is whatever is no node
below the root. A chain of siblings is followed over n - 1 links at most, so that no ring of links can hang a program.
"""

from __future__ import annotations

import torch

from kernels.base import Backend, expect, expect_inner_contiguous, expect_together

Verdict = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""emitted [N, max_accept_len], accept_lens [N], accept_index [N, max_accept_len], all int64."""


def check_tree(
    draft_tokens: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    max_accept_len: int,
    backend: Backend,
    **others: torch.Tensor,
) -> None:
    """Raise ValueError naming what does not fit. `others`: tensors that only have to be rows on the same device."""
    expect("draft_tokens", draft_tokens, (None, None), torch.long)
    rows, num_drafts = draft_tokens.shape
    expect("retrieve_next_token", retrieve_next_token, (rows, num_drafts + 1), torch.long)
    expect("retrieve_next_sibling", retrieve_next_sibling, (rows, num_drafts + 1), torch.long)
    if max_accept_len < 1:
        raise ValueError(f"max_accept_len={max_accept_len}: must be at least 1, for the bonus token")
    tensors = {
        "draft_tokens": draft_tokens,
        "retrieve_next_token": retrieve_next_token,
        "retrieve_next_sibling": retrieve_next_sibling,
        **others,
    }
    expect_together(**tensors)
    if backend == "triton":
        for name, tensor in tensors.items():
            expect_inner_contiguous(name, tensor)


def empty_verdict(rows: int, max_accept_len: int, device: torch.device) -> Verdict:
    """Outputs, not filled."""
    emitted = torch.empty(rows, max_accept_len, dtype=torch.long, device=device)
    accept_lens = torch.empty(rows, dtype=torch.long, device=device)
    return emitted, accept_lens, torch.empty(rows, max_accept_len, dtype=torch.long, device=device)


class Walk:
    """References walk all rows at once: the node where each row is, and its path so far."""

    def __init__(self, draft_tokens: torch.Tensor, next_sibling: torch.Tensor, max_accept_len: int) -> None:
        rows = len(draft_tokens)
        self.draft_tokens = draft_tokens
        self.next_sibling = next_sibling
        self.rows = torch.arange(rows, device=draft_tokens.device)
        self.node = torch.zeros_like(self.rows)
        self.accepted = torch.zeros_like(self.rows)
        self.alive = torch.ones_like(self.rows, dtype=torch.bool)
        self.emitted = draft_tokens.new_full((rows, max_accept_len), -1)
        self.path = draft_tokens.new_full((rows, max_accept_len), -1)
        self.path[:, 0] = 0

    def child(self, link: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Links [N] -> where they lead to a node of a living row, that node or 1, its token."""
        exists = (link > 0) & (link <= self.draft_tokens.shape[1]) & self.alive
        node = torch.where(exists, link, 1)
        return exists, node, self.draft_tokens[self.rows, node - 1]

    def sibling(self, exists: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        return torch.where(exists, self.next_sibling[self.rows, node], -1)

    def descend(self, chosen: torch.Tensor) -> None:
        """Step to the child `chosen` [N] and emit its token; rows without one (-1) end here."""
        self.alive &= chosen > 0
        rows, nodes = self.rows[self.alive], chosen[self.alive]
        self.emitted[rows, self.accepted[rows]] = self.draft_tokens[rows, nodes - 1]
        self.accepted[rows] += 1
        self.path[rows, self.accepted[rows]] = nodes
        self.node[rows] = nodes

    def finish(self, final: torch.Tensor) -> Verdict:
        self.emitted[self.rows, self.accepted] = final
        return self.emitted, self.accepted + 1, self.path
