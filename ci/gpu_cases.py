"""Arguments of the benchmarks: each kernel at sizes that a server meets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.build_tree import build_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """k: draft tokens of a chain; trees have 2 * k + 1 nodes, k + 1 of which can be accepted."""

    batch: int
    k: int
    vocab: int
    hidden: int
    context: int

    @property
    def nodes(self) -> int:
        return 2 * self.k + 1


@dataclass(frozen=True, slots=True)
class Arguments:
    """`nbytes`: what the kernel has to read and write at least."""

    args: tuple[Any, ...]
    nbytes: int
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    build: Callable[[Sizes, torch.device], Arguments]
    uses_vocab: bool = False


PAGE_SIZE = 16
LONG = 8
"""Bytes of an id."""


def _ids(high: int, *shape: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, high, shape, device=device)


def _size(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _lens(s: Sizes, device: torch.device) -> torch.Tensor:
    """Accept lengths, ragged."""
    return torch.arange(s.batch, device=device) % (s.k + 1) + 1


def _seq_lens(s: Sizes, device: torch.device) -> torch.Tensor:
    return torch.full((s.batch,), s.context - 4 * s.nodes * PAGE_SIZE, dtype=torch.long, device=device)


def _starts(lens: torch.Tensor) -> torch.Tensor:
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)])


def _candidates(s: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A tree two wide: each node hangs on the first of the level above."""
    node = torch.arange(2 * s.k, device=device)
    parents = torch.where(node < 2, -1, node // 2 * 2 - 2)
    return parents.repeat(s.batch, 1), node.repeat(s.batch, 1)


def _links(s: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tree = build_tree(*_candidates(s, device), _seq_lens(s, device), backend="torch")
    return tree.retrieve_next_token, tree.retrieve_next_sibling


def _probs(rows: int, places: int, vocab: int, device: torch.device) -> torch.Tensor:
    return torch.rand(rows, places, vocab, device=device).pow_(8).div_(vocab / 9)


def verify_chain_greedy(s: Sizes, device: torch.device) -> Arguments:
    target = _ids(s.vocab, s.batch, s.k + 1, device=device)
    return Arguments((target[:, :-1].contiguous(), target), _size(target) * 3)


def verify_chain_sampled(s: Sizes, device: torch.device) -> Arguments:
    target, draft = (_probs(s.batch, s.k + extra, s.vocab, device) for extra in (1, 0))
    accept, final = torch.rand(s.batch, s.k, device=device), torch.rand(s.batch, s.k + 1, device=device)
    # One row of each is read in full: the one that the last token is drawn from.
    nbytes = 2 * s.batch * s.vocab * 4
    return Arguments((_ids(s.vocab, s.batch, s.k, device=device), draft, target, accept, final), nbytes)


def verify_block(s: Sizes, device: torch.device) -> Arguments:
    given = verify_chain_sampled(s, device)
    return Arguments(given.args, _size(given.args[1], given.args[2]))


def sample_recovered(s: Sizes, device: torch.device) -> Arguments:
    target, draft = (_probs(s.batch, s.k, s.vocab, device) for _ in range(2))
    noise = torch.empty(s.batch, s.vocab, device=device).exponential_()
    return Arguments((_ids(s.vocab, s.batch, s.k, device=device), draft, target, noise), _size(target, draft, noise))


def verify_tree_greedy(s: Sizes, device: torch.device) -> Arguments:
    drafts = _ids(2, s.batch, s.nodes - 1, device=device)
    choices = _ids(2, s.batch, s.nodes, device=device)
    return Arguments((drafts, *_links(s, device), choices, s.k + 1), 6 * _size(choices))


def verify_tree_sampled(s: Sizes, device: torch.device) -> Arguments:
    target = _probs(s.batch, s.nodes, s.vocab, device)
    sibling = torch.rand(s.batch, s.k + 1, 2, device=device)
    final = torch.rand(s.batch, s.k + 1, device=device)
    drafts = _ids(s.vocab, s.batch, s.nodes - 1, device=device)
    return Arguments((drafts, *_links(s, device), target, sibling, final, s.k + 1), s.batch * s.vocab * 4)


def filter_logits(s: Sizes, device: torch.device) -> Arguments:
    logits = torch.randn(s.batch, s.k + 1, s.vocab, device=device)
    column = torch.ones(s.batch, device=device)
    top_k = torch.full((s.batch,), 50, device=device)
    return Arguments((logits, column * 0.8, top_k, column * 0.9, column * 0.05), 2 * _size(logits))


def apply_penalties(s: Sizes, device: torch.device) -> Arguments:
    logits = torch.randn(s.batch, s.k + 1, s.vocab, device=device)
    counts = _ids(2, s.batch, 1, s.vocab, device=device).to(torch.int32)
    wide = counts.expand(-1, s.k + 1, -1)
    column = torch.ones(s.batch, device=device)
    return Arguments((logits, wide, wide, column * 1.1, column * 0.5, column * 0.5), 2 * _size(logits) + _size(counts))


def logprob_rank(s: Sizes, device: torch.device) -> Arguments:
    logits = torch.randn(s.batch, s.k + 1, s.vocab, device=device)
    return Arguments((logits, _ids(s.vocab, s.batch, s.k + 1, device=device)), _size(logits))


def topn_gather(s: Sizes, device: torch.device) -> Arguments:
    logits = torch.randn(s.batch, s.k + 1, s.vocab, device=device)
    return Arguments((logits, 5), _size(logits))


def make_tree(s: Sizes, device: torch.device) -> Arguments:
    candidates = _candidates(s, device)
    nbytes = 2 * _size(*candidates) + s.batch * s.nodes * (s.nodes + 4 * LONG)
    return Arguments((*candidates, _seq_lens(s, device)), nbytes)


def prepare_inputs(s: Sizes, device: torch.device) -> Arguments:
    lens = _lens(s, device)
    widths = torch.full_like(lens, s.k)
    return Arguments((widths.cumsum(0), lens, _starts(widths + 1)), 5 * _size(lens))


def prepare_next_token(s: Sizes, device: torch.device) -> Arguments:
    sampled = _ids(s.vocab, s.batch, s.k + 1, device=device)
    discard = torch.zeros(s.batch, dtype=torch.bool, device=device)
    return Arguments((sampled, discard, sampled[:, 0].contiguous(), s.vocab), _size(sampled) + 3 * s.batch * LONG)


def next_step_slots(s: Sizes, device: torch.device) -> Arguments:
    table = _ids(10_000, s.batch, s.context // PAGE_SIZE, device=device)
    lens = _seq_lens(s, device)
    return Arguments((lens - 1, lens, table, PAGE_SIZE, s.context), 6 * _size(lens))


def shift_append(s: Sizes, device: torch.device) -> Arguments:
    ids = _ids(s.vocab, s.batch, s.k + 1, device=device)
    return Arguments((ids, _lens(s, device), ids[:, 0].contiguous()), 2 * _size(ids) + 2 * s.batch * LONG)


def copy_and_expand(s: Sizes, device: torch.device) -> Arguments:
    ids = _ids(s.vocab, s.batch * (s.k + 1), device=device)
    lens = torch.full((s.batch,), s.k + 1, dtype=torch.long, device=device)
    args = (ids, torch.arange(len(ids), device=device), _starts(lens), s.k + 1 - _lens(s, device), lens)
    return Arguments(args, 6 * _size(ids), {"num_slots": s.k, "mask_token_id": 0})


def expand_per_request(s: Sizes, device: torch.device) -> Arguments:
    lens = _lens(s, device)
    total = int(lens.sum())
    return Arguments((torch.rand(s.batch, device=device), lens.cumsum(0), total), 4 * total + 12 * s.batch)


def _table(s: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.arange(s.batch * s.context, device=device).view(s.batch, s.context)
    return table, torch.arange(s.batch, device=device)


def assign_draft_slots(s: Sizes, device: torch.device) -> Arguments:
    return Arguments((*_table(s, device), _seq_lens(s, device), 2 * s.k), s.batch * LONG * (4 * s.k + 2))


def assign_extend_slots(s: Sizes, device: torch.device) -> Arguments:
    table, rows = _table(s, device)
    ends = _seq_lens(s, device)
    args = (table, rows, ends // 2, ends, int((ends - ends // 2).sum()))
    return Arguments(args, 2 * args[-1] * LONG)


def copy_request_slots(s: Sizes, device: torch.device) -> Arguments:
    table, rows = _table(s, device)
    ends = _seq_lens(s, device)
    slots = torch.arange(int((ends - ends // 2).sum()), device=device)
    return Arguments((table, rows, ends // 2, ends, slots), 2 * _size(slots))


def _path(s: Sizes, device: torch.device) -> torch.Tensor:
    """The first child of each level, as far as the accept length."""
    step = torch.arange(s.k + 1, device=device)
    return torch.where(step < _lens(s, device)[:, None], (2 * step - 1).clamp(min=0), -1)


def compact_accepted_slots(s: Sizes, device: torch.device) -> Arguments:
    slots = torch.arange(s.batch * s.nodes, device=device).view(s.batch, s.nodes)
    path = _path(s, device)
    return Arguments((slots, path, _lens(s, device)), 2 * _size(slots) + 3 * _size(path))


def _cache(s: Sizes, device: torch.device) -> torch.Tensor:
    """One layer of 8 key heads of 128."""
    pages = s.batch * s.context // PAGE_SIZE + 1
    return torch.zeros(16, pages, PAGE_SIZE, 128, dtype=torch.bfloat16, device=device)


def move_kv_rows(s: Sizes, device: torch.device) -> Arguments:
    target = (torch.arange(s.batch, device=device)[:, None] * s.context + torch.arange(s.k, device=device)).view(-1)
    return Arguments((_cache(s, device), target + 2, target), 2 * len(target) * 16 * 128 * 2)


def fill_bonus_tokens(s: Sizes, device: torch.device) -> Arguments:
    return Arguments((_ids(s.vocab, s.batch, s.k + 1, device=device), _lens(s, device)), 3 * s.batch * LONG)


def align_evict_mask(s: Sizes, device: torch.device) -> Arguments:
    evict = torch.arange(s.nodes, device=device) >= _lens(s, device)[:, None]
    return Arguments((evict, _seq_lens(s, device), PAGE_SIZE), 2 * _size(evict) + s.batch * LONG)


def draft_kv_indices(s: Sizes, device: torch.device) -> Arguments:
    lens = _seq_lens(s, device)
    capacity = 2 * (int(lens.sum()) + s.batch * s.k)
    options = {"num_steps": s.k, "topk": 2, "page_size": PAGE_SIZE, "capacity": capacity}
    # Written twice: the fill, then the indices; read from the cache but for the first time.
    return Arguments((*_table(s, device), lens), 2 * s.k * capacity * LONG, options)


def gather_hidden_rows(s: Sizes, device: torch.device) -> Arguments:
    hidden = torch.randn(s.batch * s.nodes, s.hidden, device=device, dtype=torch.bfloat16)
    lens = _lens(s, device)
    total = int(lens.sum())
    options = {"num_draft_tokens": s.nodes, "num_rows": total}
    return Arguments((hidden, lens, _path(s, device)), 2 * total * s.hidden * 2, options)


def paged_attention(s: Sizes, device: torch.device) -> Arguments:
    """A chain's verify: k + 1 queries a request, 32 heads on 8."""
    cache = _cache(s, device)
    pages = s.context // PAGE_SIZE
    table = torch.randperm(s.batch * pages, device=device).view(s.batch, pages)
    query = torch.randn(s.batch * (s.k + 1), 32, 128, device=device, dtype=torch.bfloat16)
    positions = s.context - s.k - 1 + torch.arange(s.k + 1, device=device).repeat(s.batch, 1)
    return Arguments((query, cache, table, positions), _size(cache) + 2 * _size(query))


CASES: dict[str, Case] = {
    "verify_chain_greedy": Case(verify_chain_greedy),
    "verify_chain_sampled": Case(verify_chain_sampled, uses_vocab=True),
    "verify_tree_greedy": Case(verify_tree_greedy),
    "verify_tree_sampled": Case(verify_tree_sampled, uses_vocab=True),
    "verify_block": Case(verify_block, uses_vocab=True),
    "sample_recovered": Case(sample_recovered, uses_vocab=True),
    "filter_logits": Case(filter_logits, uses_vocab=True),
    "apply_penalties": Case(apply_penalties, uses_vocab=True),
    "logprob_rank": Case(logprob_rank, uses_vocab=True),
    "topn_gather": Case(topn_gather, uses_vocab=True),
    "build_tree": Case(make_tree),
    "prepare_inputs": Case(prepare_inputs),
    "prepare_next_token": Case(prepare_next_token),
    "next_step_slots": Case(next_step_slots),
    "shift_append": Case(shift_append),
    "copy_and_expand": Case(copy_and_expand),
    "expand_per_request": Case(expand_per_request),
    "assign_draft_slots": Case(assign_draft_slots),
    "assign_extend_slots": Case(assign_extend_slots),
    "copy_request_slots": Case(copy_request_slots),
    "compact_accepted_slots": Case(compact_accepted_slots),
    "move_kv_rows": Case(move_kv_rows),
    "fill_bonus_tokens": Case(fill_bonus_tokens),
    "align_evict_mask": Case(align_evict_mask),
    "draft_kv_indices": Case(draft_kv_indices),
    "gather_hidden_rows": Case(gather_hidden_rows),
    "paged_attention": Case(paged_attention),
}
