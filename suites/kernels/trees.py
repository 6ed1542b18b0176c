"""Draft trees as first-child and next-sibling links."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from suites.kernels.support import generator


def links(parents: Sequence[Sequence[int]], num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents of the drafts of each tree (0 is the root, draft j is node j + 1) -> retrieve_next_token and
    retrieve_next_sibling [N, num_nodes], children in ascending order. A tree may have fewer nodes than the window."""
    next_token = torch.full((len(parents), num_nodes), -1)
    next_sibling = next_token.clone()
    for row, tree in enumerate(parents):
        last: dict[int, int] = {}
        for node, parent in enumerate(tree, start=1):
            if parent in last:
                next_sibling[row, last[parent]] = node
            else:
                next_token[row, parent] = node
            last[parent] = node
    return next_token, next_sibling


def random_links(rows: int, num_nodes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged trees, each of 1..num_nodes nodes; where `seed` is a multiple of 3 some links are anything at all."""
    rng = generator(seed)

    def below(high: int) -> int:
        return int(torch.randint(high, (), generator=rng))

    trees = [[below(node) if node % 2 else below(1 + node // 2) for node in range(1, 1 + below(num_nodes))]
             for _ in range(rows)]  # fmt: skip
    next_token, next_sibling = links(trees, num_nodes)
    if seed % 3 == 0:
        for table in (next_token, next_sibling):
            wild = torch.rand(table.shape, generator=rng) < 0.3
            table[wild] = torch.randint(-2, num_nodes + 2, table.shape, generator=rng)[wild]
    return next_token, next_sibling


def check_verdict(emitted: torch.Tensor, accept_lens: torch.Tensor, accept_index: torch.Tensor) -> None:
    """As many tokens and nodes as the accept length says, then -1; the path starts at the root."""
    kept = torch.arange(emitted.shape[1], device=emitted.device) < accept_lens[:, None]
    assert (accept_lens >= 1).all()
    assert (accept_index[:, 0] == 0).all()
    assert torch.equal(emitted >= 0, kept)
    assert torch.equal(accept_index >= 0, kept)
    assert (emitted[~kept] == -1).all()
    assert (accept_index[~kept] == -1).all()
