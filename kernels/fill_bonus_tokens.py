"""The last token that each request emitted: what its next step starts from.

accept_tokens [N, num_steps + 1] int64 (rows may be strided, -1 after the accept length); accept_lens [N] int64 in
1..num_steps + 1, or 0 for padding rows. Returns bonus_tokens [N] int64: accept_tokens[i, accept_len - 1], -1 for
padding rows and for lengths beyond the row. The row width is num_steps + 1 even where a tree has more draft tokens.
Semantics: SGLang's fill_bonus_tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together


@triton.jit
def _fill_bonus_tokens(
    tokens_ptr,
    accept_lens_ptr,
    bonus_ptr,
    tokens_stride,
    num_requests,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = row < num_requests
    accept_len = tl.load(accept_lens_ptr + row, mask=real, other=0)
    inside = real & (accept_len >= 1) & (accept_len <= width)
    bonus = tl.load(tokens_ptr + row * tokens_stride + accept_len - 1, mask=inside, other=-1)
    tl.store(bonus_ptr + row, bonus, mask=real)


def reference(accept_tokens: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
    width = accept_tokens.shape[1]
    last = accept_tokens.gather(1, (accept_lens - 1).clamp(0, width - 1)[:, None])[:, 0]
    return torch.where((accept_lens >= 1) & (accept_lens <= width), last, -1)


def launch(accept_tokens: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
    rows, width = accept_tokens.shape
    bonus = torch.empty(rows, dtype=torch.long, device=accept_tokens.device)
    if rows:
        _fill_bonus_tokens[(triton.cdiv(rows, 128),)](
            accept_tokens, accept_lens, bonus, accept_tokens.stride(0), rows, width, BLOCK=128
        )
    return bonus


def fill_bonus_tokens(accept_tokens: torch.Tensor, accept_lens: torch.Tensor, *, backend: Backend) -> torch.Tensor:
    """See the module. Raises ValueError naming the tensor that does not fit."""
    rows = len(accept_tokens)
    expect("accept_tokens", accept_tokens, (rows, None), torch.long)
    expect("accept_lens", accept_lens, (rows,), torch.long)
    if accept_tokens.shape[1] == 0:
        raise ValueError("accept_tokens.shape[1]=0: must be num_steps + 1, at least 1")
    if backend == "torch":
        return reference(accept_tokens, accept_lens)
    expect_inner_contiguous("accept_tokens", accept_tokens)
    expect_inner_contiguous("accept_lens", accept_lens)
    expect_together(accept_tokens=accept_tokens, accept_lens=accept_lens)
    return launch(accept_tokens, accept_lens)


KERNEL = Kernel(
    name="fill_bonus_tokens",
    shapes="accept_tokens [N, num_steps+1], accept_lens [N] -> bonus_tokens [N]",
    call=fill_bonus_tokens,
    reference=reference,
    variants=(
        Variant(
            function=_fill_bonus_tokens,
            signature={
                "tokens_ptr": "*i64",
                "accept_lens_ptr": "*i64",
                "bonus_ptr": "*i64",
                "tokens_stride": "i64",
                "num_requests": "i32",
                "width": "i32",
                "BLOCK": "constexpr",
            },
            constexprs={"BLOCK": 128},
        ),
    ),
    properties=("equals reference", "lengths 0..w+1", "strided rows", "int64 offsets", "empty batch"),
)
