"""Padded draft inputs: where each request's last accepted row is, and how many rows behind it were rejected.

cu_num_draft_tokens [N] int64: inclusive running sum of drafts per request; num_sampled [N] int64: tokens that the
verification emitted, 0 where they do not count (an unfinished prefill); query_start_loc [N + 1] int64: first row of
each request in the flat pass. Returns index_to_sample [N] int64: flat row whose output predicts the next draft, and
num_rejected [N] int64: drafts + 1 - num_sampled, 0 for requests without drafts. The root of a window was verified
whatever came of its drafts, so num_rejected never exceeds the drafts. Semantics: vLLM's padded drafter batch
(eagle_prepare_inputs_padded_kernel).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together


@triton.jit
def _prepare_inputs(
    cu_num_draft_ptr,
    num_sampled_ptr,
    query_start_ptr,
    index_ptr,
    num_rejected_ptr,
    num_requests,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = request < num_requests
    drafts = tl.load(cu_num_draft_ptr + request, mask=real, other=0)
    drafts -= tl.load(cu_num_draft_ptr + request - 1, mask=real & (request > 0), other=0)
    sampled = tl.load(num_sampled_ptr + request, mask=real, other=0)
    rejected = tl.minimum(tl.maximum(drafts + 1 - sampled, 0), drafts)
    end = tl.load(query_start_ptr + request + 1, mask=real, other=0)
    tl.store(index_ptr + request, end - 1 - rejected, mask=real)
    tl.store(num_rejected_ptr + request, rejected, mask=real)


def reference(
    cu_num_draft_tokens: torch.Tensor, num_sampled: torch.Tensor, query_start_loc: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    drafts = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1))
    num_rejected = torch.minimum((drafts + 1 - num_sampled).clamp(min=0), drafts)
    return query_start_loc[1:] - 1 - num_rejected, num_rejected


def launch(
    cu_num_draft_tokens: torch.Tensor, num_sampled: torch.Tensor, query_start_loc: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    requests, block = len(num_sampled), 128
    index = torch.empty(requests, dtype=torch.long, device=num_sampled.device)
    num_rejected = torch.empty(requests, dtype=torch.long, device=num_sampled.device)
    if requests:
        _prepare_inputs[(triton.cdiv(requests, block),)](
            cu_num_draft_tokens, num_sampled, query_start_loc, index, num_rejected, requests, BLOCK=block
        )
    return index, num_rejected


def prepare_inputs(
    cu_num_draft_tokens: torch.Tensor, num_sampled: torch.Tensor, query_start_loc: torch.Tensor, *, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module. Raises ValueError naming the tensor that does not fit."""
    requests = len(num_sampled)
    expect("num_sampled", num_sampled, (requests,), torch.long)
    expect("cu_num_draft_tokens", cu_num_draft_tokens, (requests,), torch.long)
    expect("query_start_loc", query_start_loc, (requests + 1,), torch.long)
    if backend == "torch":
        return reference(cu_num_draft_tokens, num_sampled, query_start_loc)
    tensors = {
        "cu_num_draft_tokens": cu_num_draft_tokens,
        "num_sampled": num_sampled,
        "query_start_loc": query_start_loc,
    }
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(cu_num_draft_tokens, num_sampled, query_start_loc)


KERNEL = Kernel(
    name="prepare_inputs",
    shapes="cu_num_draft_tokens [N], num_sampled [N], query_start_loc [N+1] -> index_to_sample [N], num_rejected [N]",
    call=prepare_inputs,
    reference=reference,
    variants=(
        Variant(
            function=_prepare_inputs,
            signature={
                "cu_num_draft_ptr": "*i64",
                "num_sampled_ptr": "*i64",
                "query_start_ptr": "*i64",
                "index_ptr": "*i64",
                "num_rejected_ptr": "*i64",
                "num_requests": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 128},
        ),
    ),
    properties=("equals reference", "ragged", "no drafts", "nothing sampled", "empty batch"),
)
