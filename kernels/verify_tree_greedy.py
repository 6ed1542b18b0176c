"""Greedy verification of trees: from the root, step to the child that equals the target's choice for as long as there
is one; then emit the target's choice.

draft_tokens [N, n - 1] int64 for a window of n nodes, -1 = no node; retrieve_next_token and retrieve_next_sibling
[N, n] int64, -1 = none; target_argmax [N, n] int64: the target's choice after each node; max_accept_len: 1 + the
deepest level that is walked. Returns emitted [N, max_accept_len] int64, -1 after the accept length; accept_lens [N]
int64 in 1..max_accept_len; accept_index [N, max_accept_len] int64: window nodes of the path, the root (0) first, -1
after the accept length (node accept_index[j] predicted emitted[j]). Of several children with the same token the first
counts. Rows may be strided; a row without links is a row without drafts.

Semantics: SGLang's verify_tree_greedy, with nodes counted within the window (SpecInfer, Miao et al. 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect
from kernels.tree_walk import Verdict, Walk, check_tree, empty_verdict

PLACEHOLDER = tl.constexpr(-1)


@triton.jit(do_not_specialize=["num_nodes", "max_accept_len"])
def _verify_tree_greedy(
    draft_ptr,
    next_token_ptr,
    next_sibling_ptr,
    argmax_ptr,
    emitted_ptr,
    accept_lens_ptr,
    accept_index_ptr,
    draft_stride,
    next_token_stride,
    next_sibling_stride,
    argmax_stride,
    emitted_stride,
    accept_index_stride,
    num_nodes,
    max_accept_len,
):
    row = tl.program_id(0).to(tl.int64)
    draft_ptr += row * draft_stride
    next_token_ptr += row * next_token_stride
    next_sibling_ptr += row * next_sibling_stride
    argmax_ptr += row * argmax_stride
    emitted_ptr += row * emitted_stride
    accept_index_ptr += row * accept_index_stride
    node = row * 0
    accepted = row * 0
    going = True
    for place in range(max_accept_len):
        choice = tl.load(argmax_ptr + node)
        tl.store(emitted_ptr + place, tl.where(going, choice, PLACEHOLDER))
        tl.store(accept_index_ptr + place, tl.where(going, node, PLACEHOLDER))
        child = tl.load(next_token_ptr + node, mask=going & (place + 1 < max_accept_len), other=PLACEHOLDER)
        found = row * 0 - 1
        hops = 1
        while (found < 0) & (child > 0) & (child < num_nodes) & (hops < num_nodes):
            token = tl.load(draft_ptr + child - 1)
            found = tl.where((token == choice) & (token >= 0), child, found)
            child = tl.load(next_sibling_ptr + child)
            hops += 1
        going = found > 0
        node = tl.where(going, found, node)
        accepted += going.to(tl.int64)
    tl.store(accept_lens_ptr + row, accepted + 1)


def reference(
    draft_tokens: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_argmax: torch.Tensor,
    max_accept_len: int,
) -> Verdict:
    walk = Walk(draft_tokens, retrieve_next_sibling, max_accept_len)
    for _ in range(max_accept_len - 1):
        choice = target_argmax[walk.rows, walk.node]
        link = retrieve_next_token[walk.rows, walk.node]
        found = torch.full_like(link, -1)
        for _ in range(draft_tokens.shape[1]):
            exists, node, token = walk.child(link)
            if not bool((exists & (found < 0)).any()):
                break
            found = torch.where(exists & (found < 0) & (token == choice) & (token >= 0), node, found)
            link = walk.sibling(exists, node)
        walk.descend(found)
    return walk.finish(target_argmax[walk.rows, walk.node])


def launch(
    draft_tokens: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_argmax: torch.Tensor,
    max_accept_len: int,
) -> Verdict:
    rows, num_nodes = target_argmax.shape
    emitted, accept_lens, accept_index = empty_verdict(rows, max_accept_len, draft_tokens.device)
    if rows:
        _verify_tree_greedy[(rows,)](
            draft_tokens,
            retrieve_next_token,
            retrieve_next_sibling,
            target_argmax,
            emitted,
            accept_lens,
            accept_index,
            draft_tokens.stride(0),
            retrieve_next_token.stride(0),
            retrieve_next_sibling.stride(0),
            target_argmax.stride(0),
            emitted.stride(0),
            accept_index.stride(0),
            num_nodes,
            max_accept_len,
        )
    return emitted, accept_lens, accept_index


def verify_tree_greedy(
    draft_tokens: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_argmax: torch.Tensor,
    max_accept_len: int,
    *,
    backend: Backend,
) -> Verdict:
    """See the module. Raises ValueError naming the argument that does not fit."""
    links = (draft_tokens, retrieve_next_token, retrieve_next_sibling)
    check_tree(*links, max_accept_len, backend, target_argmax=target_argmax)
    expect("target_argmax", target_argmax, tuple(retrieve_next_token.shape), torch.long)
    return (reference if backend == "torch" else launch)(*links, target_argmax, max_accept_len)


KERNEL = Kernel(
    name="verify_tree_greedy",
    shapes="draft_tokens [N, n-1], retrieve_next_token [N, n], retrieve_next_sibling [N, n], target_argmax [N, n] -> "
    "emitted [N, max_accept_len], accept_lens [N], accept_index [N, max_accept_len]",
    call=verify_tree_greedy,
    reference=reference,
    variants=(
        Variant(
            function=_verify_tree_greedy,
            signature={
                "draft_ptr": "*i64",
                "next_token_ptr": "*i64",
                "next_sibling_ptr": "*i64",
                "argmax_ptr": "*i64",
                "emitted_ptr": "*i64",
                "accept_lens_ptr": "*i64",
                "accept_index_ptr": "*i64",
                "draft_stride": "i64",
                "next_token_stride": "i64",
                "next_sibling_stride": "i64",
                "argmax_stride": "i64",
                "emitted_stride": "i64",
                "accept_index_stride": "i64",
                "num_nodes": "i32",
                "max_accept_len": "i32",
            },
        ),
    ),
    properties=(
        "equals reference",
        "ragged trees",
        "no node",
        "twin siblings",
        "links outside the window, rings of links",
        "strided rows",
        "empty batch",
    ),
)
