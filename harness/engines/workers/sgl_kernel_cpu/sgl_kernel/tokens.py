"""Token ids between one forward pass and the next."""

from __future__ import annotations

import torch


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """The last of each request's `accept_lens` tokens; its tokens begin at every `accept_stride`-th place."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last.long()])


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Each request's ids move up by one place, and its new id goes to the last, or to the place in `input_ids` that
    `select_index` names. A request without ids is left alone."""
    for at, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if length > 0:
            input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
            last = start + length - 1 if select_index is None else int(select_index[at])
            input_ids[last] = topk_index.reshape(-1)[at]
