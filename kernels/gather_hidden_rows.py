"""Hidden rows of accepted tokens, packed: from one window of rows a request to one row a token.

hidden [N * n, width] any dtype, n = num_draft_tokens (rows may be strided): row i * n + node belongs to request i;
accept_lens [N] int64 in 0..w; accept_index [N, w] int64: window nodes of the accepted path, -1 after it (rows may be
strided), or None for chains, whose j-th token is node j. Returns rows [num_rows, width], requests one after another,
and cu_accept [N + 1] int64, 0 first: those of request i are cu_accept[i] .. cu_accept[i + 1] - 1. `num_rows` is the
sum of accept_lens or a bound on it. Rows past the sum, and those of a node outside the window, are zero: never another
request's. Semantics: the hidden states of verify windows in SGLang and vLLM, cut by accept length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together


@triton.jit
def _gather_hidden_rows(
    hidden_ptr,
    cu_accept_ptr,
    accept_index_ptr,
    out_ptr,
    hidden_stride,
    index_stride,
    num_requests,
    num_nodes,
    max_accept_len,
    width,
    CHAIN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # The request of a packed row is the number of requests that end at or before it.
    request = tl.full([], 0, tl.int64)
    for base in range(0, num_requests, BLOCK_N):
        other = base + tl.arange(0, BLOCK_N)
        end = tl.load(cu_accept_ptr + other + 1, mask=other < num_requests, other=9223372036854775807)
        request += tl.sum((end <= row).to(tl.int64), axis=0)
    real = request < num_requests
    step = row - tl.load(cu_accept_ptr + request, mask=real, other=0)
    if CHAIN:
        node = step
    else:
        in_path = real & (step < max_accept_len)
        node = tl.load(accept_index_ptr + request * index_stride + step, mask=in_path, other=-1)
    real = real & (node >= 0) & (node < num_nodes)
    source = hidden_ptr + (request * num_nodes + node) * hidden_stride + column
    value = tl.load(source, mask=column < tl.where(real, width, 0), other=0)
    tl.store(out_ptr + row * width + column, value, mask=column < width)


def _cu_accept(accept_lens: torch.Tensor) -> torch.Tensor:
    return torch.cat([accept_lens.new_zeros(1), accept_lens.cumsum(0)])


def reference(
    hidden: torch.Tensor,
    accept_lens: torch.Tensor,
    accept_index: torch.Tensor | None,
    num_draft_tokens: int,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    cu_accept = _cu_accept(accept_lens)
    row = torch.arange(num_rows, device=hidden.device)
    request = torch.bucketize(row, cu_accept[1:], right=True)
    real = request < len(accept_lens)
    step = row - cu_accept[request]
    node = step
    if accept_index is not None:
        padded = torch.nn.functional.pad(accept_index, (0, 1, 0, 1), value=-1)
        node = padded[request, torch.where(real, step, 0).clamp(max=accept_index.shape[1])]
    real = real & (node >= 0) & (node < num_draft_tokens)
    if hidden.shape[0] == 0:
        return hidden.new_zeros(num_rows, hidden.shape[1]), cu_accept
    rows = hidden[torch.where(real, request * num_draft_tokens + node, 0)]
    return torch.where(real[:, None], rows, torch.zeros_like(rows)), cu_accept


def launch(
    hidden: torch.Tensor,
    accept_lens: torch.Tensor,
    accept_index: torch.Tensor | None,
    num_draft_tokens: int,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    width, block = hidden.shape[1], 1024
    cu_accept = _cu_accept(accept_lens)
    out = torch.empty(num_rows, width, dtype=hidden.dtype, device=hidden.device)
    if out.numel():
        _gather_hidden_rows[(num_rows, triton.cdiv(width, block))](
            hidden,
            cu_accept,
            accept_index,
            out,
            hidden.stride(0),
            0 if accept_index is None else accept_index.stride(0),
            len(accept_lens),
            num_draft_tokens,
            0 if accept_index is None else accept_index.shape[1],
            width,
            CHAIN=accept_index is None,
            BLOCK_N=64,
            BLOCK=block,
        )
    return out, cu_accept


def gather_hidden_rows(
    hidden: torch.Tensor,
    accept_lens: torch.Tensor,
    accept_index: torch.Tensor | None,
    *,
    num_draft_tokens: int,
    num_rows: int,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module. Raises ValueError naming the argument that does not fit."""
    requests = len(accept_lens)
    expect("accept_lens", accept_lens, (requests,), torch.long)
    expect("hidden", hidden, (requests * num_draft_tokens, None))
    if accept_index is not None:
        expect("accept_index", accept_index, (requests, None), torch.long)
    if num_rows < 0:
        raise ValueError(f"num_rows={num_rows}: must be at least the sum of accept_lens")
    if backend == "torch":
        return reference(hidden, accept_lens, accept_index, num_draft_tokens, num_rows)
    expect_inner_contiguous("hidden", hidden)
    expect_inner_contiguous("accept_lens", accept_lens)
    if accept_index is not None:
        expect_inner_contiguous("accept_index", accept_index)
    expect_together(hidden=hidden, accept_lens=accept_lens, accept_index=accept_index)
    return launch(hidden, accept_lens, accept_index, num_draft_tokens, num_rows)


KERNEL = Kernel(
    name="gather_hidden_rows",
    shapes="hidden [N*n, width], accept_lens [N], accept_index [N, w] -> rows [sum(accept), width], cu_accept [N+1]",
    call=gather_hidden_rows,
    reference=reference,
    variants=tuple(
        Variant(
            function=_gather_hidden_rows,
            signature={
                "hidden_ptr": f"*{kind}",
                "cu_accept_ptr": "*i64",
                "accept_index_ptr": "*i64",
                "out_ptr": f"*{kind}",
                "hidden_stride": "i64",
                "index_stride": "i64",
                "num_requests": "i32",
                "num_nodes": "i32",
                "max_accept_len": "i32",
                "width": "i32",
                "CHAIN": "constexpr",
                "BLOCK_N": "constexpr",
                "BLOCK": "constexpr",
            },
            constexprs={"CHAIN": chain, "BLOCK_N": 64, "BLOCK": 1024},
        )
        for kind in ("fp32", "bf16")
        for chain in (True, False)
    ),
    properties=("equals reference", "ragged", "-1 on the path", "loose bound", "strided rows", "every dtype"),
)
