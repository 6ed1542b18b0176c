"""The stand-in for SGLang's CPU kernels, against the torch references of our kernels and against brute force."""

from __future__ import annotations

import math

import pytest
import torch

from harness.engines.workers.sgl_kernel_cpu import sgl_kernel
from harness.engines.workers.sgl_kernel_cpu.sgl_kernel.speculative import reconstruct_indices_from_tree_mask
from kernels.assign_draft_slots import assign_draft_slots
from kernels.assign_extend_slots import assign_extend_slots
from kernels.build_tree import Tree, build_tree
from kernels.compact_accepted_slots import compact_accepted_slots
from kernels.copy_request_slots import copy_request_slots
from kernels.fill_bonus_tokens import fill_bonus_tokens
from kernels.move_kv_rows import move_kv_rows
from kernels.paged_attention import paged_attention
from kernels.verify_tree_greedy import verify_tree_greedy
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")

TOPK, DEPTH = 2, 3
SEEDS = range(6)


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _table(seed: int, rows: int = 5, width: int = 24) -> torch.Tensor:
    """A request-to-slot table in which no slot occurs twice."""
    return torch.randperm(rows * width, generator=_rng(seed)).view(rows, width).int()


def _selection(seed: int, rows: int, num_drafts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SGLang's parent_list and selected_index, and the parent of each candidate as a candidate (-1 = the root).

    Level 0 has candidates 0 .. topk - 1; each further level topk candidates behind each of topk kept ones.
    """
    rng = _rng(seed)
    groups = [torch.full((rows, 1), -1)]
    for level in range(DEPTH - 1):
        first = 0 if level == 0 else TOPK + (level - 1) * TOPK * TOPK
        size = TOPK if level == 0 else TOPK * TOPK
        groups.append(torch.stack([first + torch.randperm(size, generator=rng)[:TOPK] for _ in range(rows)]))
    parent_list = torch.cat(groups, dim=1)
    above = parent_list.repeat_interleave(TOPK, dim=1)
    chosen = torch.empty(rows, num_drafts, dtype=torch.long)
    for row in range(rows):
        picked: list[int] = []
        while len(picked) < num_drafts:
            open_ = [c for c in range(above.shape[1]) if c not in picked and int(above[row, c]) in (-1, *picked)]
            picked.append(open_[int(torch.randint(len(open_), (), generator=rng))])
        chosen[row] = torch.tensor(sorted(picked))
    return parent_list, chosen, above


def _built(seed: int, full: bool, rows: int = 3, num_nodes: int = 6) -> tuple[Tree, Tree, torch.Tensor]:
    """The stand-in's tree, the reference's, and the lengths before the windows."""
    parent_list, chosen, above = _selection(seed, rows, num_nodes - 1)
    lengths = torch.randint(1, 9, (rows,), generator=_rng(seed + 100))
    size = num_nodes * (int(lengths.sum()) * full + rows * num_nodes)
    mask = torch.ones(size, dtype=torch.bool)
    index, child, sibling = torch.full((3, rows, num_nodes), -1)
    positions = torch.empty(rows * num_nodes, dtype=torch.long)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        parent_list, chosen, lengths, mask, positions, index, child, sibling, TOPK, DEPTH, num_nodes, 0 if full else 1
    )
    right = build_tree(above, chosen, lengths, mask_mode="full" if full else "qlen_only", backend="torch")
    return Tree(mask, positions.view(rows, -1), index, child, sibling, right.parents), right, lengths


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("full", [False, True])
def test_build_tree(seed: int, full: bool) -> None:
    built, right, _ = _built(seed, full)
    for name, got, wanted in zip(Tree._fields, built, right, strict=True):
        assert torch.equal(got.flatten(), wanted.flatten()), name


@pytest.mark.parametrize("seed", SEEDS)
def test_links_from_a_mask(seed: int) -> None:
    _, right, lengths = _built(seed, full=False)
    rows, num_nodes = right.positions.shape
    out = torch.full((4, rows, num_nodes), -7)
    reconstruct_indices_from_tree_mask(right.mask.flatten(), lengths, out[0], *out[1:], rows, num_nodes)
    for got, wanted in zip(out, right[1:5], strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_verify_tree_greedy(seed: int) -> None:
    tree, _, _ = _built(seed, full=False)
    rows, num_nodes = tree.positions.shape
    rng = _rng(seed)
    drafts, wanted = (torch.randint(0, 3, (rows, num_nodes), generator=rng) for _ in range(2))
    predicts = torch.zeros(rows * num_nodes, dtype=torch.int32)
    path = torch.full((rows, DEPTH + 1), -1, dtype=torch.int32)
    number = torch.empty(rows, dtype=torch.int32)
    links = (tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling)
    sgl_kernel.verify_tree_greedy_cpu(predicts, path, number, drafts, *links, wanted)
    emitted, lens, nodes = verify_tree_greedy(drafts[:, 1:], *links[1:], wanted, DEPTH + 1, backend="torch")
    assert torch.equal(number + 1, lens.int())
    for row, length in enumerate(lens.tolist()):
        flat = path[row, :length].long()
        assert torch.equal(flat, nodes[row, :length] + row * num_nodes)
        assert (path[row, length:] == -1).all()
        assert torch.equal(predicts[flat].long(), emitted[row, :length])


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_out_of_the_table_and_into_it(seed: int) -> None:
    table, rows = _table(seed), torch.tensor([3, 0, 4])
    starts = torch.randint(0, 10, (3,), generator=_rng(seed))
    ends = starts + torch.tensor([4, 0, 9])
    out = torch.empty(13, dtype=torch.long)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, starts, ends, out, table.shape[1])
    assert torch.equal(out, assign_extend_slots(table.long(), rows, starts, ends, 13, backend="torch"))
    written, right = table.clone(), table.long()
    slots = torch.arange(1000, 1013)
    sgl_kernel.assign_req_to_token_pool_cpu(rows, written, starts, ends, slots, table.shape[1])
    copy_request_slots(right, rows, starts, ends, slots, backend="torch")
    assert torch.equal(written.long(), right)


def test_slots_of_drafts() -> None:
    table, rows, lengths = _table(1), torch.tensor([2, 1]), torch.tensor([5, 11])
    out = torch.empty(12, dtype=torch.long)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, out, table.shape[1], 2, 3)
    assert torch.equal(out.view(2, 6), assign_draft_slots(table.long(), rows, lengths, 6, backend="torch"))
    branches = sgl_kernel.build_draft_decode_metadata_cpu(table, rows, lengths, 2, 3, table.shape[1])
    for at, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        for branch in range(2):
            seen = branches[2 * at + branch]
            assert torch.equal(seen[:length], table[row, :length])
            assert torch.equal(seen[length : length + 3].long(), out.view(2, 2, 3)[at, branch])


def test_accepted_slots() -> None:
    slots = torch.arange(100, 110).view(2, 5)
    path = torch.tensor([[0, 2, 4], [0, 3, -1]])
    flat = torch.where(path >= 0, path + torch.tensor([[0], [5]]), -1)
    out = torch.full((6,), -9)
    sgl_kernel.fill_accept_out_cache_loc_cpu(flat, slots.flatten(), out)
    right = compact_accepted_slots(slots, path, torch.tensor([3, 2]), backend="torch")[0]
    assert torch.equal(out[:5], right[right >= 0])
    assert out[5] == -9


def test_rows_move_as_if_at_once() -> None:
    keys, values = torch.randn(8, 2, 3), torch.randn(8, 1, 3)
    source, target = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 7])
    wanted = [
        move_kv_rows(one.clone().view(1, 8, 1, -1), source, target, backend="torch").view_as(one)
        for one in (keys, values)
    ]
    addresses = torch.tensor([keys.data_ptr(), values.data_ptr()])
    sgl_kernel.copy_all_layer_kv_cache_cpu(addresses, torch.tensor([24, 12]), target, source)
    assert torch.equal(keys, wanted[0])
    assert torch.equal(values, wanted[1])


def test_last_accepted_token() -> None:
    tokens, lens = torch.arange(12).view(3, 4), torch.tensor([4, 1, 2])
    out = torch.empty(3, dtype=torch.long)
    sgl_kernel.fill_bonus_tokens_cpu(tokens.flatten(), lens, out, 4)
    assert torch.equal(out, fill_bonus_tokens(tokens, lens, backend="torch"))


def test_ids_move_up() -> None:
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    starts, lens, new = torch.tensor([0, 3, 3]), torch.tensor([3, 0, 4]), torch.tensor([[20], [21], [22]])
    sgl_kernel.rotate_input_ids_cpu(ids, starts, lens, new)
    assert ids.tolist() == [2, 3, 20, 5, 6, 7, 22, 8]
    ids = torch.tensor([1, 2, 3, 4])
    sgl_kernel.rotate_input_ids_cpu(ids, torch.tensor([0]), torch.tensor([4]), torch.tensor([9]), torch.tensor([1]))
    assert ids.tolist() == [2, 9, 4, 4]


HEADS, KV_HEADS, WIDTH = 4, 2, 8


class Attention:
    """Ragged requests whose KV lies scattered over 96 slots."""

    def __init__(self, lengths: tuple[int, ...], new: tuple[int, ...]) -> None:
        rng = _rng(len(lengths))
        self.table, self.rows = _table(3, rows=4), torch.tensor([3, 1, 0][: len(lengths)])
        self.lengths, self.new = torch.tensor(lengths), torch.tensor(new)
        self.keys, self.values = (torch.randn(96, KV_HEADS, WIDTH, generator=rng) for _ in range(2))
        self.query = torch.randn(sum(new), HEADS, WIDTH, generator=rng)
        self.starts = self.new.cumsum(0) - self.new
        self.slots = [self.table[row, :length].long() for row, length in zip(self.rows, lengths, strict=True)]

    def right(self, request: int, at: int, columns: torch.Tensor, cap: float = 0.0) -> torch.Tensor:
        """[heads, width] of one query over some columns, one head at a time."""
        slots, query = self.slots[request][columns], self.query[at].double()
        out = []
        for head in range(HEADS):
            keys, values = (x[slots, head * KV_HEADS // HEADS].double() for x in (self.keys, self.values))
            scores = keys @ query[head] / math.sqrt(WIDTH)
            scores = cap * torch.tanh(scores / cap) if cap else scores
            out.append(scores.softmax(-1) @ values)
        return torch.stack(out).float()

    def new_rows(self) -> list[torch.Tensor]:
        """Keys and values of the new positions, in order; the buffers hold nonsense there from now on."""
        new = torch.cat([slots[len(slots) - count :] for slots, count in zip(self.slots, self.new, strict=True)])
        rows = [buffer[new].clone() for buffer in (self.keys, self.values)]
        self.keys[new] = self.values[new] = float("nan")
        return rows


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_decode_attention(cap: float) -> None:
    given = Attention((5, 1, 20), (1, 1, 1))
    wanted = torch.stack([given.right(i, i, torch.arange(n), cap) for i, n in enumerate((5, 1, 20))])
    keys, values = given.new_rows()
    loc = torch.stack([slots[-1] for slots in given.slots])
    out = torch.empty_like(given.query)
    scratch = torch.empty(0)
    sgl_kernel.decode_attention_cpu(
        *(given.query, given.keys, given.values, 1.0, 1.0, out, keys, values, loc, scratch),
        *(given.table, given.rows, given.lengths, WIDTH**-0.5, cap),
    )
    torch.testing.assert_close(out, wanted)
    assert torch.equal(given.keys[loc], keys)


def _extended(given: Attention, keys: torch.Tensor | None, values: torch.Tensor | None, *more: object) -> torch.Tensor:
    out = torch.empty_like(given.query)
    sgl_kernel.extend_attention_cpu(
        *(given.query, keys, values, out, given.keys, given.values, 1.0, 1.0),
        *(given.table, given.rows, given.lengths, given.new, given.starts, int(given.new.max())),
        *(WIDTH**-0.5, 0.0, False, 0, None, None, *more),
    )
    return out


def test_extend_attention_is_causal_and_takes_what_is_new_from_its_arguments() -> None:
    given = Attention((5, 3, 20), (2, 3, 7))
    where = [(i, n - new + j) for i, (n, new) in enumerate(((5, 2), (3, 3), (20, 7))) for j in range(new)]
    wanted = torch.stack([given.right(i, at, torch.arange(end + 1)) for at, (i, end) in enumerate(where)])
    torch.testing.assert_close(_extended(given, None, None), wanted)
    rows = given.new_rows()
    torch.testing.assert_close(_extended(given, *rows), wanted)


@pytest.mark.parametrize("full", [False, True])
def test_extend_attention_under_a_tree(full: bool) -> None:
    tree, _, lengths = _built(4, full)
    nodes = tree.positions.shape[1]
    given = Attention(tuple((lengths + nodes).tolist()), (nodes,) * len(lengths))
    sees = _built(4, full=False)[1].mask
    wanted = torch.stack([
        given.right(i, i * nodes + node, torch.cat([torch.arange(n), n + sees[i, node].nonzero()[:, 0]]))
        for i, n in enumerate(lengths.tolist())
        for node in range(nodes)
    ])  # fmt: skip
    out = _extended(given, None, None, tree.mask)
    torch.testing.assert_close(out, wanted)
    ours = paged_attention(
        given.query,
        torch.stack([given.keys, given.values]).permute(0, 2, 1, 3).reshape(2 * KV_HEADS, 96, 1, WIDTH).contiguous(),
        given.table[given.rows].long(),
        torch.zeros(len(lengths), nodes, dtype=torch.long),
        scale=WIDTH**-0.5,
        window_start=lengths,
        window_mask=sees,
        backend="torch",
    )
    torch.testing.assert_close(out, ours)


def test_what_it_does_not_know_it_refuses() -> None:
    given = Attention((5,), (2,))
    with pytest.raises(NotImplementedError, match="sliding_window_size"):
        sgl_kernel.extend_attention_cpu(
            *(given.query, None, None, given.query, given.keys, given.values, 1.0, 1.0),
            *(given.table, given.rows, given.lengths, given.new, given.starts, 2, 1.0, 0.0, False, 7),
        )
