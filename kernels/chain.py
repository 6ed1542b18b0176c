"""What sampled verification of chains takes and gives, by token or by block: checks and compile variants."""

from __future__ import annotations

from typing import Any

import torch

from kernels.base import (
    FLOATS,
    VOCAB_WARPS,
    Backend,
    Variant,
    expect,
    expect_inner_contiguous,
    expect_together,
    expect_uniform,
)

Block = tuple[torch.Tensor, torch.Tensor]
"""emitted [N, k + 1] int64, accept_lens [N] int64."""

SHAPES = (
    "draft_tokens [N, k], draft_probs [N, k, V] or None, target_probs [N, k+1, V], accept_uniform [N, k], "
    "final_uniform [N, k+1] -> emitted [N, k+1], accept_lens [N]"
)


def check_chain(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    accept_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
    backend: Backend,
) -> None:
    """Raise ValueError naming the tensor that does not fit the others."""
    expect("draft_tokens", draft_tokens, (None, None), torch.long)
    rows, num_drafts = draft_tokens.shape
    expect("target_probs", target_probs, (rows, num_drafts + 1, None), *FLOATS)
    vocab = target_probs.shape[2]
    if vocab == 0:
        raise ValueError(f"target_probs.shape={list(target_probs.shape)}: the vocabulary must not be empty")
    if draft_probs is not None:
        expect("draft_probs", draft_probs, (rows, num_drafts, vocab), *FLOATS)
    expect_uniform("accept_uniform", accept_uniform, (rows, num_drafts))
    expect_uniform("final_uniform", final_uniform, (rows, num_drafts + 1))
    tensors = {
        "draft_tokens": draft_tokens,
        "draft_probs": draft_probs,
        "target_probs": target_probs,
        "accept_uniform": accept_uniform,
        "final_uniform": final_uniform,
    }
    expect_together(**tensors)
    if backend == "triton":
        for name, tensor in tensors.items():
            if tensor is not None:
                expect_inner_contiguous(name, tensor)


def block_of(tokens: torch.Tensor, accepted: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
    """tokens [N, k + 1], accepted [N], final [N] -> emitted: the accepted tokens, the final one, then -1."""
    place = torch.arange(tokens.shape[1], device=tokens.device) - accepted[:, None]
    return torch.where(place < 0, tokens, torch.where(place == 0, final[:, None], -1))


def chain_variants(function: Any, **constexprs: int) -> tuple[Variant, ...]:
    """With draft probabilities and without, float32 laws and float64 coins as the engine has them."""
    return tuple(_variant(function, with_probs, constexprs) for with_probs in (True, False))


def _variant(function: Any, with_probs: bool, constexprs: dict[str, int]) -> Variant:
    return Variant(
        function=function,
        signature={
            "draft_ptr": "*i64",
            "q_ptr": "*fp32" if with_probs else "constexpr",
            "p_ptr": "*fp32",
            "accept_ptr": "*fp64",
            "final_ptr": "*fp64",
            "emitted_ptr": "*i64",
            "accept_lens_ptr": "*i64",
            "draft_stride": "i64",
            "q_row_stride": "i64",
            "q_stride": "i64",
            "p_row_stride": "i64",
            "p_stride": "i64",
            "accept_stride": "i64",
            "final_stride": "i64",
            "emitted_stride": "i64",
            "num_drafts": "i32",
            "vocab": "i32",
            **dict.fromkeys(constexprs, "constexpr"),
        },
        constexprs=constexprs if with_probs else {"q_ptr": None, **constexprs},
        num_warps=VOCAB_WARPS,
    )


def strides(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    accept_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
    emitted: torch.Tensor,
) -> tuple[int, ...]:
    """The stride arguments of both kernels, in order."""
    q_strides = (0, 0) if draft_probs is None else draft_probs.stride()[:2]
    return (
        draft_tokens.stride(0),
        *q_strides,
        *target_probs.stride()[:2],
        accept_uniform.stride(0),
        final_uniform.stride(0),
        emitted.stride(0),
    )
