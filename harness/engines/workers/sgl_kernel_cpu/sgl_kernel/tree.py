"""Trees of drafts: their masks and links, and the walk that verifies one.

Node 0 of a request's n = draft_token_num nodes is the last committed token, and node i + 1 the draft that its
`selected_index[i]` names: a number in the list of candidates, of which each level of the tree has topk per parent.
`parent_list` [N, ·] has the candidate behind each group of topk, group 0 hanging on the root.
"""

from __future__ import annotations

from enum import IntEnum

import torch


class TreeMaskMode(IntEnum):
    """SGLang's numbers for what a mask covers: context and nodes, or nodes only."""

    FULL_MASK = 0
    QLEN_ONLY = 1


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Of every node: whom it sees (itself and what it hangs on), its position, its row in the flat output, its first
    child and its next sibling (-1 = none, as the caller has filled in). Prefix columns of a full mask stay as they are.
    """
    mode = TreeMaskMode(int(tree_mask_mode))
    read = 0
    for row, length in enumerate(verified_seq_len.tolist()):
        above = _parents(parent_list.view(len(verified_seq_len), -1)[row].tolist(), selected_index[row].tolist(), topk)
        width = draft_token_num + (length if mode is TreeMaskMode.FULL_MASK else 0)
        block = tree_mask[read : read + draft_token_num * width].view(draft_token_num, width)[:, width - len(above) :]
        read += draft_token_num * width
        block.fill_(False)
        for node in range(draft_token_num):
            path = _path(above, node, depth)
            block[node, path] = True
            positions[row * draft_token_num + node] = length + len(path) - 1
            retrieve_index[row, node] = row * draft_token_num + node
        for node in range(draft_token_num - 1, 0, -1):
            parent = above[node]
            if parent >= 0:
                retrieve_next_sibling[row, node] = retrieve_next_token[row, parent]
                retrieve_next_token[row, parent] = node


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """From the root down: to the child that is what the target predicts, until there is none. predicts [N * n]: the
    target's token, at every node of the path. accept_index [N, most]: rows of the path in the flat output, the root
    first. accept_token_num [N]: nodes of the path but the root. The arguments are spelt as SGLang spells them."""
    drafts, wanted = candidates.tolist(), target_predict.view(candidates.shape).tolist()
    child, sibling, flat = retrive_next_token.tolist(), retrive_next_sibling.tolist(), retrive_index.tolist()
    for row in range(len(drafts)):
        node, path = 0, [0]
        while len(path) < accept_index.shape[1]:
            below = child[row][node]
            while below >= 0 and drafts[row][below] != wanted[row][node]:
                below = sibling[row][below]
            if below < 0:
                break
            node = below
            path.append(node)
        for at, step in enumerate(path):
            accept_index[row, at] = flat[row][step]
            predicts[flat[row][step]] = wanted[row][step]
        accept_token_num[row] = len(path) - 1


def _parents(parent_list: list[int], selected: list[int], topk: int) -> list[int]:
    """The node that each node hangs on; -1 for the root, and for a draft whose parent was not selected."""
    node_of = {candidate: at + 1 for at, candidate in reversed(list(enumerate(selected)))}
    above = [-1]
    for candidate in selected:
        group = candidate // topk
        above.append(0 if group == 0 else node_of.get(parent_list[group], -1))
    return above


def _path(above: list[int], node: int, depth: int) -> list[int]:
    """The node and what it hangs on, at most `depth` drafts up."""
    path = [0]
    while node > 0 and len(path) <= depth:
        path.append(node)
        node = above[node]
    return path
