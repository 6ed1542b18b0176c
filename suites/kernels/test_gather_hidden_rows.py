"""Packed hidden rows equal their reference: each is its own request's and node's, by value."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gather_hidden_rows import gather_hidden_rows
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.4, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=batches,
    num_nodes=st.integers(1, 6),
    width=st.sampled_from([1, 7, 1024, 1025]),
    chain=st.booleans(),
    slack=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=seeds,
    extra=st.integers(0, 2),
)
def test_equals_reference(
    rows: int, num_nodes: int, width: int, chain: bool, slack: int, dtype: torch.dtype, seed: int, extra: int
) -> None:
    random = generator(seed)
    steps = num_nodes if chain else min(4, num_nodes)
    # The value of a row names it.
    hidden = torch.arange(1, rows * num_nodes + 1)[:, None].expand(-1, width).to(dtype)
    accept_lens = torch.randint(0, steps + 1, (rows,), generator=random)
    path = torch.rand(rows, num_nodes, generator=random).argsort(1)[:, :steps]
    path = torch.where(torch.arange(steps) < accept_lens[:, None], path, -1)
    (packed, cu_accept), _ = compare(
        gather_hidden_rows,
        strided(hidden, extra),
        accept_lens,
        None if chain else strided(path, extra),
        num_draft_tokens=num_nodes,
        num_rows=int(accept_lens.sum()) + slack,
    )
    expected = []
    for row, count in enumerate(accept_lens.tolist()):
        nodes = range(count) if chain else path[row, :count].tolist()
        expected += [row * num_nodes + node + 1 for node in nodes]
    assert packed[:, 0].tolist() == expected + [0] * slack
    assert packed[:, -1].tolist() == expected + [0] * slack
    assert cu_accept.diff().tolist() == accept_lens.tolist()


def test_an_invalid_node_gives_zeros_not_another_request() -> None:
    hidden = torch.arange(1.0, 7.0)[:, None]
    path = torch.tensor([[0, -1], [0, 3]])
    args = (hidden, torch.tensor([2, 2]), path)
    (packed, _), _ = compare(gather_hidden_rows, *args, num_draft_tokens=3, num_rows=4)
    assert packed[:, 0].tolist() == [1.0, 0.0, 4.0, 0.0]


def test_many_requests() -> None:
    hidden = torch.arange(1.0, 2 * 70 + 1)[:, None]
    lens = torch.arange(70) % 3
    compare(gather_hidden_rows, hidden, lens, None, num_draft_tokens=2, num_rows=int(lens.sum()))
