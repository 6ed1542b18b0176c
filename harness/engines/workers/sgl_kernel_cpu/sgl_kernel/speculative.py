"""What SGLang's n-gram drafter takes from `sgl_kernel.speculative`."""

from __future__ import annotations

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """The links of a tree from its mask: tree_mask flat [N, n, n], node i sees its ancestors j < i and itself. Results
    are flat or [N, n]: position = committed length + number of ancestors, row of the node in the flat output, first
    child, next sibling (-1 = none; nodes without a parent have none)."""
    n = draft_token_num
    masks = tree_mask.view(batch_size, n, n).tolist()
    where, index, child, sibling = (
        out.view(batch_size, n) for out in (positions, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    )
    for row, length in enumerate(verified_seq_len.tolist()[:batch_size]):
        ancestors = [[j for j in range(i) if masks[row][i][j]] for i in range(n)]
        above = [nodes[-1] if nodes else -1 for nodes in ancestors]
        for node in range(n):
            where[row, node] = length + len(ancestors[node])
            index[row, node] = row * n + node
            child[row, node] = next((k for k in range(node + 1, n) if node in ancestors[k]), -1)
            level = (k for k in range(node + 1, n) if above[k] == above[node])
            sibling[row, node] = next(level, -1) if above[node] >= 0 else -1
