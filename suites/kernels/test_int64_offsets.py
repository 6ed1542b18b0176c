"""Offsets past 2^31 elements: rows so far apart that 32 bits cannot tell where they are, in memory that is never used.

Row 2 starts past 2^31, while the distance of two rows fits 32 bits: exactly where a product is taken in 32 bits.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.align_evict_mask import align_evict_mask
from kernels.assign_draft_slots import assign_draft_slots
from kernels.assign_extend_slots import assign_extend_slots
from kernels.build_tree import build_tree
from kernels.compact_accepted_slots import compact_accepted_slots
from kernels.copy_request_slots import copy_request_slots
from kernels.draft_kv_indices import draft_kv_indices
from kernels.fill_bonus_tokens import fill_bonus_tokens
from kernels.gather_hidden_rows import gather_hidden_rows
from kernels.move_kv_rows import move_kv_rows
from kernels.next_step_slots import next_step_slots
from kernels.paged_attention import paged_attention
from kernels.prepare_next_token import prepare_next_token
from kernels.shift_append import shift_append
from suites.kernels.guard import DEVICE, tensors_of
from suites.registration import suite

suite(seconds=0.4, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")

APART = 2**30 + 8
BELOW = 2**31
"""Elements before the first row: a product that wrapped around lands there, and fails a test instead of the process."""
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="a device has no memory that is promised, but never used")


def far(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The same values, with the slices of `dim` APART elements from each other."""
    inner = tensor.movedim(dim, 0).contiguous()
    extent = BELOW + (len(inner) - 1) * APART + inner[0].numel()
    # A file with holes: only the pages that are touched exist.
    with tempfile.TemporaryFile() as file:
        file.truncate(extent * tensor.element_size())
        memory = mmap.mmap(file.fileno(), 0)
    view = torch.frombuffer(memory, dtype=tensor.dtype).as_strided(inner.shape, (APART, *inner.stride()[1:]), BELOW)
    return view.copy_(inner).movedim(0, dim)


IDS = torch.arange(1, 13).view(3, 4)
LENS = torch.tensor([1, 2, 3])
ROWS = torch.tensor([2, 0, 1])
CACHE = torch.arange(2.0 * 3 * 2 * 16).view(2, 3, 2, 16) / 64
"""Two heads of three pages of two slots of 16."""

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int]] = {
    "prepare_next_token": (prepare_next_token, (IDS, LENS < 0, LENS, 99), {}, 0),
    "shift_append": (shift_append, (IDS, LENS, LENS), {}, 0),
    "next_step_slots": (next_step_slots, (IDS, 2, 8), {}, 0),
    "fill_bonus_tokens": (fill_bonus_tokens, (IDS, LENS), {}, 0),
    "compact_accepted_slots": (compact_accepted_slots, (IDS, IDS % 4, LENS), {}, 0),
    "align_evict_mask": (align_evict_mask, (IDS % 3 > 0, LENS, 2), {}, 0),
    "assign_draft_slots": (assign_draft_slots, (IDS, ROWS, LENS, 2), {}, 0),
    "assign_extend_slots": (assign_extend_slots, (IDS, ROWS, LENS - 1, LENS + 1, 6), {}, 0),
    "copy_request_slots": (copy_request_slots, (IDS, ROWS, LENS - 1, LENS + 1, LENS.repeat(2)), {}, 0),
    "draft_kv_indices": (
        draft_kv_indices,
        (IDS, ROWS, LENS - 1),
        {"num_steps": 2, "topk": 1, "page_size": 1, "capacity": 9},
        0,
    ),
    "build_tree": (build_tree, (IDS - 2 - IDS[:, :1], torch.arange(4).repeat(3, 1), LENS), {}, 0),
    "gather_hidden_rows": (
        gather_hidden_rows,
        (IDS.float(), LENS % 2, None),
        {"num_draft_tokens": 1, "num_rows": 2},
        0,
    ),
    "move_kv_rows": (move_kv_rows, (CACHE, torch.tensor([5, 0]), torch.tensor([1, 4])), {}, 1),
    "paged_attention": (
        paged_attention,
        (torch.ones(1, 1, 16), CACHE, torch.tensor([[2, 0, 1]]), torch.tensor([[5]])),
        {},
        1,
    ),
}


def arguments(name: str, place: Callable[[torch.Tensor, int], torch.Tensor]) -> tuple[Any, ...]:
    """The case's arguments, the far one placed; paged_attention's is its cache, next_step_slots' its block table."""
    _, args, _, dim = CASES[name]
    if name == "next_step_slots":
        return (LENS, LENS, place(args[0], dim), *args[1:])
    position = 1 if name == "paged_attention" else 0
    return tuple(place(value, dim) if i == position else value for i, value in enumerate(args))


@pytest.mark.parametrize("name", CASES)
def test_rows_past_2_to_the_31(name: str) -> None:
    call, _, options, _ = CASES[name]
    if name == "gather_hidden_rows":
        options = {**options, "num_rows": int((LENS % 2).sum())}
    expected = call(*arguments(name, lambda tensor, _: tensor.clone()), **options, backend="torch")
    got = call(*arguments(name, far), **options, backend="triton")
    for want, have in zip(tensors_of(expected), tensors_of(got), strict=True):
        torch.testing.assert_close(have, want, atol=1e-6 if name == "paged_attention" else 0.0, rtol=0.0)
