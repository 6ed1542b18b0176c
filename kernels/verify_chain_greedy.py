"""Greedy verification of chains: copy the target's choices up to and including the first that no draft foresaw.

draft_tokens [N, k] int64, -1 = no draft (never accepted); target_argmax [N, k + 1] int64: the target's choice after the
root and after each draft. Returns emitted [N, k + 1] int64, -1 after the accept length, and accept_lens [N] int64 in
1..k + 1. Rows may be strided. Semantics: greedy speculative decoding (Leviathan et al. 2023), as in vLLM's
rejection_greedy_sample_kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together

PLACEHOLDER = tl.constexpr(-1)


@triton.jit
def _verify_chain_greedy(
    draft_ptr,
    argmax_ptr,
    emitted_ptr,
    accept_lens_ptr,
    draft_stride,
    argmax_stride,
    emitted_stride,
    num_drafts,
):
    row = tl.program_id(0).to(tl.int64)
    draft_ptr += row * draft_stride
    argmax_ptr += row * argmax_stride
    emitted_ptr += row * emitted_stride
    accepted = 0
    going = True
    for position in range(num_drafts):
        choice = tl.load(argmax_ptr + position)
        draft = tl.load(draft_ptr + position)
        tl.store(emitted_ptr + position, tl.where(going, choice, PLACEHOLDER))
        going = going & (draft == choice)
        accepted += going.to(tl.int32)
    bonus = tl.load(argmax_ptr + num_drafts)
    tl.store(emitted_ptr + num_drafts, tl.where(going, bonus, PLACEHOLDER))
    tl.store(accept_lens_ptr + row, (accepted + 1).to(tl.int64))


def reference(draft_tokens: torch.Tensor, target_argmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    accepted = (draft_tokens == target_argmax[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    columns = torch.arange(target_argmax.shape[1], device=target_argmax.device)
    return target_argmax.masked_fill(columns > accepted[:, None], -1), accepted + 1


def launch(draft_tokens: torch.Tensor, target_argmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, num_drafts = draft_tokens.shape
    emitted = torch.empty(rows, num_drafts + 1, dtype=torch.long, device=draft_tokens.device)
    accept_lens = torch.empty(rows, dtype=torch.long, device=draft_tokens.device)
    if rows:
        _verify_chain_greedy[(rows,)](
            draft_tokens,
            target_argmax,
            emitted,
            accept_lens,
            draft_tokens.stride(0),
            target_argmax.stride(0),
            emitted.stride(0),
            num_drafts,
        )
    return emitted, accept_lens


def verify_chain_greedy(
    draft_tokens: torch.Tensor, target_argmax: torch.Tensor, *, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module. Raises ValueError naming the tensor that does not fit."""
    rows, num_drafts = draft_tokens.shape
    expect("draft_tokens", draft_tokens, (rows, num_drafts), torch.long)
    expect("target_argmax", target_argmax, (rows, num_drafts + 1), torch.long)
    if backend == "torch":
        return reference(draft_tokens, target_argmax)
    expect_inner_contiguous("draft_tokens", draft_tokens)
    expect_inner_contiguous("target_argmax", target_argmax)
    expect_together(draft_tokens=draft_tokens, target_argmax=target_argmax)
    return launch(draft_tokens, target_argmax)


KERNEL = Kernel(
    name="verify_chain_greedy",
    shapes="draft_tokens [N, k], target_argmax [N, k+1] -> emitted [N, k+1], accept_lens [N]",
    call=verify_chain_greedy,
    reference=reference,
    variants=(
        Variant(
            function=_verify_chain_greedy,
            signature={
                "draft_ptr": "*i64",
                "argmax_ptr": "*i64",
                "emitted_ptr": "*i64",
                "accept_lens_ptr": "*i64",
                "draft_stride": "i64",
                "argmax_stride": "i64",
                "emitted_stride": "i64",
                "num_drafts": "i32",
            },
        ),
    ),
    properties=("equals reference", "ragged", "no draft", "strided rows", "empty batch", "ids 0 and V-1"),
)
