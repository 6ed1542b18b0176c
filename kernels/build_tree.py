"""From a selection of draft candidates to the tree that is verified: mask, positions and links.

candidate_parents [N, C] int64: the candidate that each candidate hangs on, -1 = the root; chosen [N, n - 1] int64: the
candidates that were selected, parents before children, -1 = no draft (rows of both may be strided); prefix_lens [N]
int64: KV entries before the window, i.e. the root's position. Node 0 is the root, chosen[j] is node j + 1. A draft of
-1, and one whose parent is not among the chosen before it, is no node: nothing links to it, it sees itself only.

Returns a Tree, all int64 but the mask, n = num_draft_tokens:
  mask                   "full": [sum(n * (prefix_len + n))] bool, for each request n rows over prefix and window;
                         "qlen_only": [N, n, n] bool, node i sees node j: its ancestors and itself;
                         "packed": [N, n, ceil(n / 32)] int32, bit j % 32 of word j // 32 says the same
  positions              [N, n]: prefix_len + depth
  retrieve_index         [N, n]: row of the node in the flat verify output, i * n + node; -1 = no node
  retrieve_next_token    [N, n]: the node's first child; -1 = none
  retrieve_next_sibling  [N, n]: the next child of the same parent; -1 = none
  parents                [N, n - 1]: node that each draft hangs on; -1 = no node

With parents as nodes already: candidate_parents = parents - 1, chosen = 0 .. n - 2. Semantics: SGLang's
build_tree_kernel_efficient, over EAGLE-2 selections (Li et al. 2024).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together

MaskMode = Literal["full", "qlen_only", "packed"]
_MODES: tuple[MaskMode, ...] = ("full", "qlen_only", "packed")
BLOCK = 64
WARPS = 8
"""One tile holds any tree, so one compilation serves them all; fewer warps make for many registers a thread."""


class Tree(NamedTuple):
    mask: torch.Tensor
    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    parents: torch.Tensor


@triton.jit(do_not_specialize=["full"])
def _build_tree(
    candidate_parents_ptr,
    chosen_ptr,
    prefix_lens_ptr,
    mask_starts_ptr,
    mask_ptr,
    positions_ptr,
    index_ptr,
    next_token_ptr,
    next_sibling_ptr,
    parents_ptr,
    candidates_stride,
    chosen_stride,
    num_candidates,
    num_nodes,
    full,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    across, down = node[None, :], node[:, None]
    is_draft = (node > 0) & (node < num_nodes)
    chosen = tl.load(chosen_ptr + row * chosen_stride + node - 1, mask=is_draft, other=-1)
    known = is_draft & (chosen >= 0) & (chosen < num_candidates)
    above = tl.load(candidate_parents_ptr + row * candidates_stride + chosen, mask=known, other=-1)
    # In range, so 32 bits hold them; -2 and num_candidates match nothing.
    above = tl.minimum(tl.maximum(above, -1), num_candidates).to(tl.int32)
    chosen = tl.where(known, chosen, -2).to(tl.int32)
    parent = tl.max(tl.where((above[:, None] == chosen[None, :]) & (across < down), across, -1), axis=1)
    parent = tl.where(known & (above == -1), 0, tl.where(known, parent, -1))

    # All nodes climb to the root at once; who does not arrive there is no node.
    at, depth = parent, tl.full([BLOCK], 0, tl.int32)
    sees = down == across
    rooted = node == 0
    while tl.max(at, axis=0) >= 0:
        here = at[:, None] == across
        sees = sees | here
        rooted = rooted | (at == 0)
        depth += (at >= 0).to(tl.int32)
        above = tl.sum(tl.where(here, parent[None, :], 0), axis=1)
        at = tl.where(at >= 0, above, -1)
    sees = (sees & rooted[:, None]) | (down == across)
    depth = tl.where(rooted, depth, 0)
    parent = tl.where(rooted, parent, -1)

    is_child = (across > 0) & rooted[None, :]
    child = tl.min(tl.where(is_child & (parent[None, :] == down), across, BLOCK), axis=1)
    is_sibling = is_child & (across > down) & (parent[None, :] == parent[:, None]) & (down > 0)
    sibling = tl.min(tl.where(is_sibling, across, BLOCK), axis=1)

    real = node < num_nodes
    prefix_len = tl.load(prefix_lens_ptr + row)
    out = row * num_nodes + node
    tl.store(positions_ptr + out, prefix_len + depth, mask=real)
    tl.store(index_ptr + out, tl.where(rooted, out, -1), mask=real)
    tl.store(next_token_ptr + out, tl.where(child < BLOCK, child, -1).to(tl.int64), mask=real)
    tl.store(next_sibling_ptr + out, tl.where(sibling < BLOCK, sibling, -1).to(tl.int64), mask=real)
    tl.store(parents_ptr + row * (num_nodes - 1) + node - 1, parent.to(tl.int64), mask=is_draft)
    if PACKED:
        num_words = (num_nodes + 31) // 32
        for word in range(num_words):
            bit = tl.where(sees & (across // 32 == word), (1 << (across % 32)).to(tl.int64), 0)
            words = mask_ptr + (row * num_nodes + node) * num_words + word
            tl.store(words, tl.sum(bit, axis=1).to(tl.int32), mask=real)
    else:
        before = tl.where(full != 0, prefix_len, 0)
        width = num_nodes + before
        start = row * num_nodes * num_nodes
        start = before + tl.load(mask_starts_ptr + row, mask=full != 0, other=0) + tl.where(full != 0, 0, start)
        tl.store(mask_ptr + start + down * width + across, sees, mask=(down < num_nodes) & (across < num_nodes))


def reference(
    candidate_parents: torch.Tensor,
    chosen: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask_mode: MaskMode,
    num_prefix_tokens: int,
) -> Tree:
    device, (rows, num_drafts), num_candidates = chosen.device, chosen.shape, candidate_parents.shape[1]
    num_nodes = num_drafts + 1
    row = torch.arange(rows, device=device)
    known = (chosen >= 0) & (chosen < num_candidates)
    # Node of each candidate, -1 while it is not chosen; one more column takes what is no candidate.
    node_of = torch.full((rows, num_candidates + 1), -1, dtype=torch.long, device=device)
    parents = torch.empty_like(chosen)
    sees = torch.eye(num_nodes, dtype=torch.bool, device=device).repeat(rows, 1, 1)
    padded = torch.nn.functional.pad(candidate_parents, (0, 1), value=-1)
    for draft in range(num_drafts):
        candidate = torch.where(known[:, draft], chosen[:, draft], num_candidates)
        above = padded[row, candidate]
        inside = (above >= 0) & (above < num_candidates)
        parent = torch.where(above < 0, 0, node_of[row, torch.where(inside, above, num_candidates)])
        parent = torch.where(known[:, draft], parent, -1)
        parents[:, draft] = parent
        found = parent >= 0
        sees[:, draft + 1] |= sees[row, parent.clamp(min=0)] & found[:, None]
        node_of[row[found], candidate[found]] = draft + 1
    rooted = torch.nn.functional.pad(parents >= 0, (1, 0), value=True)
    depth = sees.sum(-1) - 1
    node = torch.arange(num_nodes, device=device)
    is_child = torch.nn.functional.pad(parents[:, None, :] == node[:, None], (1, 0)) & rooted[:, None, :]
    of = torch.nn.functional.pad(parents, (1, 0), value=-1)
    is_sibling = (of[:, :, None] == of[:, None, :]) & (of >= 0)[:, None, :] & (node > node[:, None])
    first = [torch.where(m, node, num_nodes).amin(-1) for m in (is_child, is_sibling)]
    child, sibling = (torch.where(found < num_nodes, found, -1) for found in first)
    return Tree(
        mask=_mask(sees, prefix_lens, mask_mode, num_prefix_tokens),
        positions=prefix_lens[:, None] + depth,
        retrieve_index=torch.where(rooted, row[:, None] * num_nodes + node, -1),
        retrieve_next_token=child,
        retrieve_next_sibling=sibling,
        parents=parents,
    )


def _mask(sees: torch.Tensor, prefix_lens: torch.Tensor, mask_mode: MaskMode, num_prefix_tokens: int) -> torch.Tensor:
    rows, num_nodes = sees.shape[:2]
    if mask_mode == "qlen_only":
        return sees
    node = torch.arange(num_nodes, device=sees.device)
    if mask_mode == "packed":
        words = [
            (sees[..., word : word + 32].long() << node[: num_nodes - word][:32]).sum(-1)
            for word in range(0, num_nodes, 32)
        ]
        return torch.stack(words, -1).to(torch.int32)
    mask = torch.ones(num_nodes * (num_prefix_tokens + rows * num_nodes), dtype=torch.bool, device=sees.device)
    width = (prefix_lens + num_nodes)[:, None, None]
    corner = _mask_starts(prefix_lens, num_nodes)[:, None, None] + prefix_lens[:, None, None]
    mask[corner + node[:, None] * width + node] = sees
    return mask


def _mask_starts(prefix_lens: torch.Tensor, num_nodes: int) -> torch.Tensor:
    sizes = num_nodes * (prefix_lens + num_nodes)
    return sizes.cumsum(0) - sizes


def launch(
    candidate_parents: torch.Tensor,
    chosen: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask_mode: MaskMode,
    num_prefix_tokens: int,
) -> Tree:
    device, (rows, num_drafts) = chosen.device, chosen.shape
    num_nodes = num_drafts + 1
    mask_starts = prefix_lens  # read for full masks alone
    if mask_mode == "full":
        # The prefix is visible to every node; the kernel writes the window.
        size = num_nodes * (num_prefix_tokens + rows * num_nodes)
        mask = torch.ones(size, dtype=torch.bool, device=device)
        mask_starts = _mask_starts(prefix_lens, num_nodes)
    elif mask_mode == "qlen_only":
        mask = torch.empty(rows, num_nodes, num_nodes, dtype=torch.bool, device=device)
    else:
        mask = torch.empty(rows, num_nodes, triton.cdiv(num_nodes, 32), dtype=torch.int32, device=device)
    nodes = [torch.empty(rows, num_nodes, dtype=torch.long, device=device) for _ in range(4)]
    tree = Tree._make([mask, *nodes, torch.empty(rows, num_drafts, dtype=torch.long, device=device)])
    if rows:
        _build_tree[(rows,)](
            candidate_parents,
            chosen,
            prefix_lens,
            mask_starts,
            *tree,
            candidate_parents.stride(0),
            chosen.stride(0),
            candidate_parents.shape[1],
            num_nodes,
            int(mask_mode == "full"),
            PACKED=mask_mode == "packed",
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return tree


def build_tree(
    candidate_parents: torch.Tensor,
    chosen: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    mask_mode: MaskMode = "qlen_only",
    num_prefix_tokens: int | None = None,
    backend: Backend,
) -> Tree:
    """See the module. `num_prefix_tokens` is the sum of prefix_lens, which a full mask's size depends on: None asks the
    device for it. Raises ValueError naming the argument that does not fit."""
    rows = len(chosen)
    expect("chosen", chosen, (rows, None), torch.long)
    expect("candidate_parents", candidate_parents, (rows, None), torch.long)
    expect("prefix_lens", prefix_lens, (rows,), torch.long)
    if mask_mode not in _MODES:
        raise ValueError(f"mask_mode={mask_mode!r}: must be 'full', 'qlen_only' or 'packed'")
    if chosen.shape[1] >= BLOCK:
        raise ValueError(f"chosen.shape[1]={chosen.shape[1]}: a tree has at most {BLOCK - 1} drafts")
    if num_prefix_tokens is None:
        num_prefix_tokens = int(prefix_lens.sum()) if mask_mode == "full" else 0
    if backend == "torch":
        return reference(candidate_parents, chosen, prefix_lens, mask_mode, num_prefix_tokens)
    tensors = {"candidate_parents": candidate_parents, "chosen": chosen, "prefix_lens": prefix_lens}
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(candidate_parents, chosen, prefix_lens, mask_mode, num_prefix_tokens)


KERNEL = Kernel(
    name="build_tree",
    shapes="candidate_parents [N, C], chosen [N, n-1], prefix_lens [N] -> mask, positions, three links [N, n], parents",
    call=build_tree,
    reference=reference,
    variants=tuple(
        Variant(
            function=_build_tree,
            signature={
                "candidate_parents_ptr": "*i64",
                "chosen_ptr": "*i64",
                "prefix_lens_ptr": "*i64",
                "mask_starts_ptr": "*i64",
                "mask_ptr": "*i32" if packed else "*i1",
                "positions_ptr": "*i64",
                "index_ptr": "*i64",
                "next_token_ptr": "*i64",
                "next_sibling_ptr": "*i64",
                "parents_ptr": "*i64",
                "candidates_stride": "i64",
                "chosen_stride": "i64",
                "num_candidates": "i32",
                "num_nodes": "i32",
                "full": "i32",
                "PACKED": "constexpr",
                "BLOCK": "constexpr",
            },
            constexprs={"PACKED": packed, "BLOCK": BLOCK},
            num_warps=WARPS,
        )
        for packed in (False, True)
    ),
    properties=(
        "equals reference",
        "every mask",
        "-1 drafts",
        "orphans",
        "chains to stars",
        "32 and 33 nodes",
        "empty batch",
    ),
)
