"""Page-aligned eviction equals its reference, and a page never goes while anything on it stays."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.align_evict_mask import align_evict_mask
from suites.kernels.guard import compare
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.4, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")


@examples
@given(
    rows=batches,
    num_nodes=st.integers(0, 20),
    page_size=st.sampled_from([1, 2, 4, 16]),
    seed=seeds,
    extra=st.integers(0, 2),
)
def test_equals_reference(rows: int, num_nodes: int, page_size: int, seed: int, extra: int) -> None:
    random = generator(seed)
    evict = torch.rand(rows, num_nodes, generator=random) < 0.7
    seq_lens = torch.randint(0, 40, (rows,), generator=random)
    out, _ = compare(align_evict_mask, strided(evict, extra), seq_lens, page_size)
    for row in range(rows):
        start = int(seq_lens[row])
        stays = {page for page in range(start // page_size + 1) if page * page_size < start}
        stays |= {(start + slot) // page_size for slot in range(num_nodes) if not evict[row, slot]}
        assert out[row].tolist() == [(start + slot) // page_size not in stays for slot in range(num_nodes)]
