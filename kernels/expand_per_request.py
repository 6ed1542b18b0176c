"""One value a request becomes one value a draft token, with one value replaced by another on the way.

values [N] int64, int32, float32 or bool; cu_num_tokens [N] int64: inclusive running sum of tokens per request, of which
the last is `num_tokens`. Returns [num_tokens] of the same dtype. `replace_from` becomes `replace_to` (a temperature of
0, say, becomes 1). Semantics: vLLM's expand_kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together

TYPES = {torch.long: "i64", torch.int32: "i32", torch.float32: "fp32", torch.bool: "i1"}


@triton.jit
def _expand_per_request(
    values_ptr,
    cu_num_tokens_ptr,
    out_ptr,
    num_tokens,
    replace_from,
    replace_to,
    REPLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_tokens_ptr + request - 1, mask=request > 0, other=0)
    end = tl.minimum(tl.load(cu_num_tokens_ptr + request), num_tokens)
    value = tl.load(values_ptr + request)
    if REPLACE:
        value = tl.where(value == replace_from, replace_to, value).to(out_ptr.dtype.element_ty)
    for base in range(start, end, BLOCK):
        token = base + tl.arange(0, BLOCK)
        tl.store(out_ptr + token, value, mask=token < end)


def reference(
    values: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace: tuple[float, float] | None
) -> torch.Tensor:
    if replace is not None:
        values = torch.where(values == replace[0], torch.tensor(replace[1], dtype=values.dtype), values)
    lens = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.repeat_interleave(values, lens, output_size=num_tokens)


def launch(
    values: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace: tuple[float, float] | None
) -> torch.Tensor:
    out = torch.empty(num_tokens, dtype=values.dtype, device=values.device)
    if num_tokens:
        source, target = replace or (0, 0)
        _expand_per_request[(len(values),)](
            values, cu_num_tokens, out, num_tokens, source, target, REPLACE=replace is not None, BLOCK=32, num_warps=1
        )
    return out


def expand_per_request(
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    *,
    replace: tuple[float, float] | None = None,
    backend: Backend,
) -> torch.Tensor:
    """See the module; `replace` is (replace_from, replace_to). Raises ValueError naming what does not fit."""
    requests = len(values)
    expect("values", values, (requests,), *TYPES)
    expect("cu_num_tokens", cu_num_tokens, (requests,), torch.long)
    if num_tokens < 0 or (num_tokens and not requests):
        raise ValueError(f"num_tokens={num_tokens}: must be cu_num_tokens[-1], or 0 without requests")
    if backend == "torch":
        return reference(values, cu_num_tokens, num_tokens, replace)
    expect_inner_contiguous("values", values)
    expect_inner_contiguous("cu_num_tokens", cu_num_tokens)
    expect_together(values=values, cu_num_tokens=cu_num_tokens)
    return launch(values, cu_num_tokens, num_tokens, replace)


KERNEL = Kernel(
    name="expand_per_request",
    shapes="values [N], cu_num_tokens [N] -> [num_tokens]",
    call=expand_per_request,
    reference=reference,
    variants=tuple(
        Variant(
            function=_expand_per_request,
            signature={
                "values_ptr": f"*{kind}",
                "cu_num_tokens_ptr": "*i64",
                "out_ptr": f"*{kind}",
                "num_tokens": "i32",
                "replace_from": "fp32" if kind == "fp32" else "i32",
                "replace_to": "fp32" if kind == "fp32" else "i32",
                "REPLACE": "constexpr",
                "BLOCK": "constexpr",
            },
            constexprs={"REPLACE": replace, "BLOCK": 32},
            num_warps=1,
        )
        for kind, replace in (("i64", False), ("fp32", False), ("fp32", True))
    ),
    properties=(
        "equals reference",
        "ragged",
        "requests without tokens",
        "replaced value",
        "every dtype",
        "empty batch",
    ),
)
