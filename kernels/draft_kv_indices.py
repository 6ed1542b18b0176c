"""KV that each branch reads at each draft step: the request's committed slots, then the branch's own drafts.

request_slots [R, W] int64: slot of each token position of each table row (rows may be strided); request_rows, seq_lens
[N] int64. Branch t of request i reads at step s (0-based) table entries 0 .. seq_len - 1 and the s + 1 entries from its
own start on. Branches follow each other from seq_len, num_steps entries each; with pages, a branch starts on pages of
its own, as far into the first as the committed tokens reach into theirs, so that it can hold a copy of that part:
  start = seq_len + t * page_size * ceil((seq_len % page_size + num_steps) / page_size).
Returns kv_indices [num_steps, capacity] int64, branches in order (request, then branch), -1 behind them and for entries
past the table; kv_indptr [num_steps, N * topk + 1] int64, 0 first: where each branch's run begins. `capacity` holds the
last step: topk * (sum(seq_lens) + N * num_steps) at least; what exceeds it is dropped. Semantics: SGLang's
generate_draft_decode_kv_indices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together


@triton.jit
def _draft_kv_indices(
    table_ptr,
    request_rows_ptr,
    seq_lens_ptr,
    cu_seq_lens_ptr,
    indices_ptr,
    indptr_ptr,
    table_stride,
    table_width,
    num_requests,
    num_steps,
    topk,
    page_size,
    capacity,
    BLOCK: tl.constexpr,
):
    step = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    branch = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    before = tl.load(cu_seq_lens_ptr + request) - seq_len
    table_ptr += tl.load(request_rows_ptr + request) * table_stride
    length = seq_len + step + 1
    first = topk * (before + request * (step + 1)) + branch * length
    pages = (seq_len % page_size + num_steps + page_size - 1) // page_size
    own = branch * pages * page_size
    for base in range(0, length, BLOCK):
        column = base + tl.arange(0, BLOCK)
        entry = tl.where(column < seq_len, column, column + own)
        slot = tl.load(table_ptr + entry, mask=(column < length) & (entry < table_width), other=-1)
        inside = (column < length) & (first + column < capacity)
        tl.store(indices_ptr + step * capacity + first + column, slot, mask=inside)
    indptr_ptr += step * (num_requests * topk + 1)
    tl.store(indptr_ptr + request * topk + branch + 1, first + length)
    if (request == 0) & (branch == 0):
        tl.store(indptr_ptr, first)


def reference(
    request_slots: torch.Tensor,
    request_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    num_steps: int,
    topk: int,
    page_size: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    requests, width = len(seq_lens), request_slots.shape[1]
    index = torch.arange(capacity, device=seq_lens.device)
    pages = (seq_lens % page_size + num_steps + page_size - 1) // page_size
    kv_indices, kv_indptr = [], []
    for step in range(num_steps):
        lens = (seq_lens + step + 1).repeat_interleave(topk)
        ends = lens.cumsum(0)
        indptr = torch.cat([ends.new_zeros(1), ends])
        owner = torch.bucketize(index, ends, right=True)
        real = owner < requests * topk
        owner = torch.where(real, owner, 0)
        slots = torch.full_like(index, -1)
        if requests:
            request, branch = owner // topk, owner % topk
            column = index - indptr[owner]
            own = branch * pages[request] * page_size
            entry = torch.where(column < seq_lens[request], column, column + own)
            found = request_slots[request_rows[request], torch.where(real, entry, 0).clamp(max=width - 1)]
            slots = torch.where(real & (entry < width), found, -1)
        kv_indices.append(slots)
        kv_indptr.append(indptr)
    return torch.stack(kv_indices), torch.stack(kv_indptr)


def launch(
    request_slots: torch.Tensor,
    request_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    num_steps: int,
    topk: int,
    page_size: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    requests, device = len(seq_lens), seq_lens.device
    kv_indices = torch.full((num_steps, capacity), -1, dtype=torch.long, device=device)
    kv_indptr = torch.zeros(num_steps, requests * topk + 1, dtype=torch.long, device=device)
    if requests:
        _draft_kv_indices[(num_steps, requests, topk)](
            request_slots,
            request_rows,
            seq_lens,
            seq_lens.cumsum(0),
            kv_indices,
            kv_indptr,
            request_slots.stride(0),
            request_slots.shape[1],
            requests,
            num_steps,
            topk,
            page_size,
            capacity,
            BLOCK=256,
        )
    return kv_indices, kv_indptr


def draft_kv_indices(
    request_slots: torch.Tensor,
    request_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_steps: int,
    topk: int,
    page_size: int,
    capacity: int,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module. Raises ValueError naming the argument that does not fit."""
    requests = len(seq_lens)
    expect("request_slots", request_slots, (None, None), torch.long)
    expect("request_rows", request_rows, (requests,), torch.long)
    expect("seq_lens", seq_lens, (requests,), torch.long)
    for name, value, least in (
        ("num_steps", num_steps, 1),
        ("topk", topk, 1),
        ("page_size", page_size, 1),
        ("capacity", capacity, 0),
    ):
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    options = (num_steps, topk, page_size, capacity)
    if backend == "torch":
        return reference(request_slots, request_rows, seq_lens, *options)
    tensors = {"request_slots": request_slots, "request_rows": request_rows, "seq_lens": seq_lens}
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(request_slots, request_rows, seq_lens, *options)


KERNEL = Kernel(
    name="draft_kv_indices",
    shapes="request_slots [R, W], request_rows [N], seq_lens [N] -> kv_indices [steps, C], kv_indptr [steps, N*topk+1]",
    call=draft_kv_indices,
    reference=reference,
    variants=(
        Variant(
            function=_draft_kv_indices,
            signature={
                "table_ptr": "*i64",
                "request_rows_ptr": "*i64",
                "seq_lens_ptr": "*i64",
                "cu_seq_lens_ptr": "*i64",
                "indices_ptr": "*i64",
                "indptr_ptr": "*i64",
                "table_stride": "i64",
                "table_width": "i32",
                "num_requests": "i32",
                "num_steps": "i32",
                "topk": "i32",
                "page_size": "i32",
                "capacity": "i64",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 256},
        ),
    ),
    properties=("equals reference", "ragged", "page sizes 1..16", "table end", "tight and loose bound", "empty batch"),
)
