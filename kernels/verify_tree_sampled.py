"""Sampled verification of trees: at each node children are tried in order against the target's law with the rejected
ones taken out; the walk ends where none is accepted, with a token drawn from what is left.

draft_tokens [N, n - 1] int64 for a window of n nodes; -1, or an id outside the vocabulary, = no node; such a child is
passed over. retrieve_next_token and retrieve_next_sibling [N, n] int64, -1 = none. target_probs [N, n, V] of any float
type: the law after each node. sibling_uniform [N, max_accept_len, S]: coin of the i-th child tried at a depth; children
after the S-th are not tried. final_uniform [N, max_accept_len]: for the token drawn when the walk ends at that depth.
Both float32 or float64 in [0, 1). max_accept_len: 1 + the deepest level that is walked. Returns emitted
[N, max_accept_len], accept_lens [N] and accept_index [N, max_accept_len], int64, as verify_tree_greedy does.

Child i is accepted while coin * (mass left) < mass of its token; masses are float64, and a token that was rejected has
none. Where nothing is left the lowest id comes out that was not rejected. All but the last dims may be strided.

Semantics: recursive rejection sampling for drafts chosen without chance (Miao et al. 2023; EAGLE, Li et al. 2024).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import FLOATS, VOCAB_WARPS, Backend, Kernel, Variant, expect, expect_uniform, vocab_block
from kernels.mass import NO_ID, draw_of, mass, mass_of, upcast, zero
from kernels.tree_walk import Verdict, Walk, check_tree, empty_verdict

PLACEHOLDER = tl.constexpr(-1)


@triton.jit
def _tried(ids, child, hops, draft_ptr, next_sibling_ptr):
    """Which ids are tokens of the first `hops` siblings from `child` on."""
    found = ids < 0
    for _ in range(hops):
        found = found | (ids == tl.load(draft_ptr + child - 1))
        child = tl.load(next_sibling_ptr + child)
    return found


@triton.jit
def _tile(p_ptr, start, vocab, child, hops, draft_ptr, next_sibling_ptr, BLOCK: tl.constexpr):
    """Ids, their masses without what was tried, and the ids that lie in the vocabulary and were not tried."""
    ids = start + tl.arange(0, BLOCK)
    inside = ids < vocab
    tried = _tried(ids, child, hops, draft_ptr, next_sibling_ptr)
    masses = tl.where(tried, 0.0, mass(tl.load(p_ptr + ids, mask=inside, other=0.0)))
    return ids, masses, tl.where(tried, NO_ID, tl.where(inside, ids, NO_ID))


@triton.jit
def _draw_left(p_ptr, uniform, vocab, child, hops, draft_ptr, next_sibling_ptr, BLOCK: tl.constexpr):
    """An id from p without what was tried."""
    total = zero()
    lowest = NO_ID
    for start in range(0, vocab, BLOCK):
        _, masses, free = _tile(p_ptr, start, vocab, child, hops, draft_ptr, next_sibling_ptr, BLOCK)
        total += tl.sum(masses, 0)
        lowest = tl.minimum(lowest, tl.min(free, 0))
    threshold = uniform * total
    before = zero()
    start = 0
    found = NO_ID
    last = -1
    while (start < vocab) & (found == NO_ID):
        ids, masses, _ = _tile(p_ptr, start, vocab, child, hops, draft_ptr, next_sibling_ptr, BLOCK)
        hit = (before + tl.cumsum(masses, 0) > threshold) & (masses > 0)
        found = tl.min(tl.where(hit, ids, NO_ID), 0)
        last = tl.maximum(last, tl.max(tl.where(masses > 0, ids, -1), 0))
        before += tl.sum(masses, 0)
        start += BLOCK
    found = tl.where(found == NO_ID, last, found)
    found = tl.where(found < 0, lowest, found)
    return tl.where(found == NO_ID, 0, found)


@triton.jit
def _total(p_ptr, vocab, BLOCK: tl.constexpr):
    total = zero()
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        total += tl.sum(mass(tl.load(p_ptr + ids, mask=ids < vocab, other=0.0)), 0)
    return total


@triton.jit(do_not_specialize=["num_nodes", "max_accept_len", "num_coins"])
def _verify_tree_sampled(
    draft_ptr,
    next_token_ptr,
    next_sibling_ptr,
    p_ptr,
    coin_ptr,
    final_ptr,
    emitted_ptr,
    accept_lens_ptr,
    accept_index_ptr,
    draft_stride,
    next_token_stride,
    next_sibling_stride,
    p_row_stride,
    p_stride,
    coin_row_stride,
    coin_stride,
    final_stride,
    emitted_stride,
    accept_index_stride,
    num_nodes,
    max_accept_len,
    num_coins,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    draft_ptr += row * draft_stride
    next_token_ptr += row * next_token_stride
    next_sibling_ptr += row * next_sibling_stride
    p_ptr += row * p_row_stride
    coin_ptr += row * coin_row_stride
    emitted_ptr += row * emitted_stride
    accept_index_ptr += row * accept_index_stride
    node = row * 0
    accepted = row * 0
    first = row * 0 - 1
    hops = 0
    going = True
    while going:
        tl.store(accept_index_ptr + accepted, node)
        law_ptr = p_ptr + node * p_stride
        first = tl.load(next_token_ptr + node, mask=accepted + 1 < max_accept_len, other=PLACEHOLDER)
        left = zero()
        if (first > 0) & (first < num_nodes):
            left = _total(law_ptr, vocab, BLOCK)
        child = first
        chosen = row * 0 - 1
        tries = 0
        hops = 0
        while (chosen < 0) & (child > 0) & (child < num_nodes) & (hops + 1 < num_nodes) & (tries < num_coins):
            token = tl.load(draft_ptr + child - 1)
            is_node = (token >= 0) & (token < vocab)
            twin = _tried(token, first, hops, draft_ptr, next_sibling_ptr)
            weight = mass(tl.load(law_ptr + token, mask=is_node & ~twin, other=0.0))
            coin = upcast(tl.load(coin_ptr + accepted * coin_stride + tries))
            chosen = tl.where((coin * left < weight) & (weight > 0), child, chosen)
            left -= weight
            tries += is_node.to(tl.int32)
            hops += 1
            child = tl.load(next_sibling_ptr + child)
        going = chosen > 0
        if going:
            tl.store(emitted_ptr + accepted, tl.load(draft_ptr + chosen - 1))
            accepted += 1
            node = chosen
    uniform = upcast(tl.load(final_ptr + row * final_stride + accepted))
    law_ptr = p_ptr + node * p_stride
    final = _draw_left(law_ptr, uniform, vocab, first, hops, draft_ptr, next_sibling_ptr, BLOCK)
    tl.store(emitted_ptr + accepted, final.to(tl.int64))
    tl.store(accept_lens_ptr + row, accepted + 1)
    for place in range(accepted + 1, max_accept_len):
        tl.store(emitted_ptr + place, row * 0 - 1)
        tl.store(accept_index_ptr + place, row * 0 - 1)


def reference(
    draft_tokens: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_probs: torch.Tensor,
    sibling_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
    max_accept_len: int,
) -> Verdict:
    walk = Walk(draft_tokens, retrieve_next_sibling, max_accept_len)
    num_coins, vocab = sibling_uniform.shape[2], target_probs.shape[2]
    law = mass_of(target_probs[:, 0])
    allowed = torch.ones_like(law, dtype=torch.bool)
    for depth in range(max_accept_len - 1):
        left = law.sum(1)
        link = retrieve_next_token[walk.rows, walk.node]
        chosen, tries = torch.full_like(link, -1), torch.zeros_like(link)
        for _ in range(draft_tokens.shape[1]):
            exists, node, token = walk.child(link)
            trying = exists & (chosen < 0) & (tries < num_coins)
            if not bool(trying.any()):
                break
            is_node = trying & (token >= 0) & (token < vocab)
            token = torch.where(is_node, token, 0)
            weight = torch.where(is_node, law[walk.rows, token], 0.0)
            coin = sibling_uniform[walk.rows, depth, tries.clamp(max=num_coins - 1)].double()
            accept = is_node & (coin * left < weight) & (weight > 0)
            chosen = torch.where(accept, node, chosen)
            rejected = is_node & ~accept
            law[walk.rows[rejected], token[rejected]] = 0.0
            allowed[walk.rows[rejected], token[rejected]] = False
            left = torch.where(rejected, left - weight, left)
            tries = tries + is_node.long()
            link = walk.sibling(trying, node)
        walk.descend(chosen)
        law = torch.where(walk.alive[:, None], mass_of(target_probs[walk.rows, walk.node]), law)
        allowed |= walk.alive[:, None]
    return walk.finish(draw_of(law, allowed, final_uniform[walk.rows, walk.accepted]))


def launch(
    draft_tokens: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_probs: torch.Tensor,
    sibling_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
    max_accept_len: int,
) -> Verdict:
    rows, num_nodes, vocab = target_probs.shape
    emitted, accept_lens, accept_index = empty_verdict(rows, max_accept_len, draft_tokens.device)
    if rows:
        _verify_tree_sampled[(rows,)](
            draft_tokens,
            retrieve_next_token,
            retrieve_next_sibling,
            target_probs,
            sibling_uniform,
            final_uniform,
            emitted,
            accept_lens,
            accept_index,
            draft_tokens.stride(0),
            retrieve_next_token.stride(0),
            retrieve_next_sibling.stride(0),
            *target_probs.stride()[:2],
            *sibling_uniform.stride()[:2],
            final_uniform.stride(0),
            emitted.stride(0),
            accept_index.stride(0),
            num_nodes,
            max_accept_len,
            sibling_uniform.shape[2],
            vocab,
            BLOCK=vocab_block(vocab),
            num_warps=VOCAB_WARPS,
        )
    return emitted, accept_lens, accept_index


def verify_tree_sampled(
    draft_tokens: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_probs: torch.Tensor,
    sibling_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
    max_accept_len: int,
    *,
    backend: Backend,
) -> Verdict:
    """See the module. Raises ValueError naming the argument that does not fit."""
    links = (draft_tokens, retrieve_next_token, retrieve_next_sibling)
    numbers = {
        "target_probs": target_probs,
        "sibling_uniform": sibling_uniform,
        "final_uniform": final_uniform,
    }
    check_tree(*links, max_accept_len, backend, **numbers)
    rows, num_nodes = retrieve_next_token.shape
    expect("target_probs", target_probs, (rows, num_nodes, None), *FLOATS)
    if target_probs.shape[2] == 0:
        raise ValueError(f"target_probs.shape={list(target_probs.shape)}: the vocabulary must not be empty")
    expect_uniform("sibling_uniform", sibling_uniform, (rows, max_accept_len, None))
    expect_uniform("final_uniform", final_uniform, (rows, max_accept_len))
    run = reference if backend == "torch" else launch
    return run(*links, target_probs, sibling_uniform, final_uniform, max_accept_len)


KERNEL = Kernel(
    name="verify_tree_sampled",
    shapes="draft_tokens [N, n-1], retrieve_next_token [N, n], retrieve_next_sibling [N, n], target_probs [N, n, V], "
    "sibling_uniform [N, max_accept_len, S], final_uniform [N, max_accept_len] -> emitted [N, max_accept_len], "
    "accept_lens [N], accept_index [N, max_accept_len]",
    call=verify_tree_sampled,
    reference=reference,
    variants=(
        Variant(
            function=_verify_tree_sampled,
            signature={
                "draft_ptr": "*i64",
                "next_token_ptr": "*i64",
                "next_sibling_ptr": "*i64",
                "p_ptr": "*fp32",
                "coin_ptr": "*fp64",
                "final_ptr": "*fp64",
                "emitted_ptr": "*i64",
                "accept_lens_ptr": "*i64",
                "accept_index_ptr": "*i64",
                "draft_stride": "i64",
                "next_token_stride": "i64",
                "next_sibling_stride": "i64",
                "p_row_stride": "i64",
                "p_stride": "i64",
                "coin_row_stride": "i64",
                "coin_stride": "i64",
                "final_stride": "i64",
                "emitted_stride": "i64",
                "accept_index_stride": "i64",
                "num_nodes": "i32",
                "max_accept_len": "i32",
                "num_coins": "i32",
                "vocab": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 1024},
            num_warps=VOCAB_WARPS,
        ),
    ),
    properties=(
        "equals reference",
        "exact law",
        "ragged trees",
        "no node, ids outside the vocabulary",
        "twin siblings",
        "links outside the window, rings of links",
        "NaN, inf and zero rows",
        "tile edges",
        "strided rows",
        "int64 offsets",
        "empty batch",
    ),
    spills="a few scalars: links and counters of the walk outlive sums over laws",
    spill_limit=24,
)
