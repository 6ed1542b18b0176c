"""The token that each request continues from: the last valid id that its step sampled, else a backup.

sampled_token_ids [N, w] int64, w in 1..k + 1, -1 = rejected (rows may be strided); discard [N] bool: the row's tokens
do not count (an unfinished prefill); backup_token_ids [N] int64: the known token that follows there; an id is valid in
[0, vocab_size). Returns next_token_ids [N] int64 and num_valid [N] int64, the valid ids of the row (0 when discarded).
Semantics: vLLM's eagle_prepare_next_token_padded_kernel, except that the last valid id counts wherever it stands.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.base import Backend, Kernel, Variant, expect, expect_inner_contiguous, expect_together


@triton.jit
def _prepare_next_token(
    sampled_ptr,
    discard_ptr,
    backup_ptr,
    next_ptr,
    num_valid_ptr,
    sampled_stride,
    width,
    vocab_size,
):
    row = tl.program_id(0).to(tl.int64)
    sampled_ptr += row * sampled_stride
    counts = tl.load(discard_ptr + row) == 0
    token = tl.load(backup_ptr + row)
    num_valid = tl.full([], 0, tl.int64)
    for column in range(width):
        sampled = tl.load(sampled_ptr + column)
        valid = counts & (sampled >= 0) & (sampled < vocab_size)
        token = tl.where(valid, sampled, token)
        num_valid += valid.to(tl.int64)
    tl.store(next_ptr + row, token)
    tl.store(num_valid_ptr + row, num_valid)


def reference(
    sampled_token_ids: torch.Tensor, discard: torch.Tensor, backup_token_ids: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    valid = (sampled_token_ids >= 0) & (sampled_token_ids < vocab_size) & ~discard[:, None]
    reached = valid.cumsum(1)
    token = sampled_token_ids.gather(1, reached.argmax(1, keepdim=True))[:, 0]
    num_valid = reached[:, -1]
    return torch.where(num_valid > 0, token, backup_token_ids), num_valid


def launch(
    sampled_token_ids: torch.Tensor, discard: torch.Tensor, backup_token_ids: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = sampled_token_ids.shape
    next_token_ids = torch.empty(rows, dtype=torch.long, device=sampled_token_ids.device)
    num_valid = torch.empty(rows, dtype=torch.long, device=sampled_token_ids.device)
    if rows:
        _prepare_next_token[(rows,)](
            sampled_token_ids,
            discard,
            backup_token_ids,
            next_token_ids,
            num_valid,
            sampled_token_ids.stride(0),
            width,
            vocab_size,
            num_warps=1,
        )
    return next_token_ids, num_valid


def prepare_next_token(
    sampled_token_ids: torch.Tensor,
    discard: torch.Tensor,
    backup_token_ids: torch.Tensor,
    vocab_size: int,
    *,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module. Raises ValueError naming the argument that does not fit."""
    rows = len(sampled_token_ids)
    expect("sampled_token_ids", sampled_token_ids, (rows, None), torch.long)
    expect("discard", discard, (rows,), torch.bool)
    expect("backup_token_ids", backup_token_ids, (rows,), torch.long)
    if sampled_token_ids.shape[1] == 0:
        raise ValueError(
            "sampled_token_ids.shape[1]=0: must hold at least one column; pass -1 for rows without a token"
        )
    if vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size}: must be at least 1")
    if backend == "torch":
        return reference(sampled_token_ids, discard, backup_token_ids, vocab_size)
    tensors = {"sampled_token_ids": sampled_token_ids, "discard": discard, "backup_token_ids": backup_token_ids}
    for name, tensor in tensors.items():
        expect_inner_contiguous(name, tensor)
    expect_together(**tensors)
    return launch(sampled_token_ids, discard, backup_token_ids, vocab_size)


KERNEL = Kernel(
    name="prepare_next_token",
    shapes="sampled_token_ids [N, w], discard [N], backup_token_ids [N] -> next_token_ids [N], num_valid [N]",
    call=prepare_next_token,
    reference=reference,
    variants=(
        Variant(
            function=_prepare_next_token,
            signature={
                "sampled_ptr": "*i64",
                "discard_ptr": "*i1",
                "backup_ptr": "*i64",
                "next_ptr": "*i64",
                "num_valid_ptr": "*i64",
                "sampled_stride": "i64",
                "width": "i32",
                "vocab_size": "i32",
            },
            num_warps=1,
        ),
    ),
    properties=("equals reference", "discarded rows", "-1 anywhere", "ids 0, V-1 and V", "strided rows", "empty batch"),
)
