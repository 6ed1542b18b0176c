"""Attention over the slots that the request-to-slot table names, one request at a time.

query and out [tokens, heads, width]; key_buffer and value_buffer [slots, kv_heads, width]; req_to_token [rows, length]
int32: the slot of every position of a request; req_pool_indices [N]: the row of each request in it. Query heads share
KV heads in groups. `logit_cap` > 0 bends a score s to cap * tanh(s / cap).
"""

from __future__ import annotations

import torch


def decode_attention_cpu(
    query: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    key_scale: float,
    value_scale: float,
    out: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
    logit_cap: float,
    is_cross_attn: bool = False,
    sliding_window_size: int = 0,
    encoder_lens: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """One query token a request, over its first `seq_lens` positions. `key` and `value` [N, kv_heads, width] are stored
    at `loc` first, when there are any. `attn_logits` is room for a kernel that splits the work; this one does not."""
    del attn_logits
    _refuse(key_scale, value_scale, is_cross_attn, sliding_window_size, encoder_lens, sinks)
    if key is not None and value is not None:
        key_buffer[loc] = key.view(-1, *key_buffer.shape[1:]).to(key_buffer.dtype)
        value_buffer[loc] = value.view(-1, *value_buffer.shape[1:]).to(value_buffer.dtype)
    for at, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length].long()
        keys, values = key_buffer[slots], value_buffer[slots]
        out[at : at + 1] = _attention(query[at : at + 1], keys, values, scaling, logit_cap, None)


def extend_attention_cpu(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    out: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    scaling: float,
    logit_cap: float,
    is_cross_attn: bool = False,
    sliding_window_size: int = 0,
    encoder_lens: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """The last `extend_seq_lens` of a request's `seq_lens` positions are queries, from row `extend_start_loc` on. What
    was there before comes from the buffers, the rest from `key` and `value` [tokens, kv_heads, width] (from the buffers
    too, when there are none).

    Each query sees what was there before, and of the new positions those up to its own, or those that the flat
    `tree_mask` names: per request a [new, new] block, or a [new, seq_len] one that covers what was there before too.
    """
    del max_len_extend
    _refuse(key_scale, value_scale, is_cross_attn, sliding_window_size, encoder_lens, sinks)
    new_lens = extend_seq_lens.tolist()
    whole_rows = tree_mask is not None and tree_mask.numel() > sum(new * new for new in new_lens)
    read = 0
    batch = zip(req_pool_indices.tolist(), seq_lens.tolist(), new_lens, extend_start_loc.tolist(), strict=True)
    for row, length, new, start in batch:
        slots = req_to_token[row, :length].long()
        mine = slice(start, start + new)
        keys, values = key_buffer[slots], value_buffer[slots]
        if key is not None and value is not None:
            keys[length - new :] = key.view(-1, *key_buffer.shape[1:])[mine]
            values[length - new :] = value.view(-1, *value_buffer.shape[1:])[mine]
        visible = None
        if tree_mask is not None:
            width = length if whole_rows else new
            block = tree_mask[read : read + new * width].view(new, width)
            visible = torch.nn.functional.pad(block.bool(), (length - width, 0), value=True)
            read += new * width
        elif is_causal:
            visible = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        out[mine] = _attention(query[mine], keys, values, scaling, logit_cap, visible)


def _refuse(
    key_scale: float,
    value_scale: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """What no Llama-like model asks for. `sliding_window_size` 0 is no window."""
    for name, wanted in (
        ("key_scale", key_scale != 1.0),
        ("value_scale", value_scale != 1.0),
        ("is_cross_attn", is_cross_attn),
        ("sliding_window_size", sliding_window_size > 0),
        ("encoder_lens", encoder_lens is not None),
        ("sinks", sinks is not None),
    ):
        if wanted:
            raise NotImplementedError(f"{name}: the stand-in for sgl_kernel does not know it")


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    logit_cap: float,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    """[tokens, heads, width] over [length, kv_heads, width], in float32; `visible` [tokens, length]."""
    tokens, heads, _ = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(tokens, kv_heads, heads // kv_heads, -1).float()
    scores = torch.einsum("tkgw,lkw->kgtl", grouped, keys.float()) * scaling
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    seen = torch.einsum("kgtl,lkw->tkgw", scores.softmax(-1), values.float())
    return seen.reshape(tokens, heads, -1).to(query.dtype)
