"""Device-side steps of speculative decoding: a Triton kernel each, with its torch reference. One file per kernel.

`KERNELS[name]` is the `KERNEL` of file `name`; a new kernel is registered by its line here.
"""

from __future__ import annotations

from kernels.base import Registry

KERNELS = Registry(
    # verification and sampling
    "verify_chain_greedy",
    "verify_chain_sampled",
    "verify_tree_greedy",
    "verify_tree_sampled",
    "verify_block",
    "sample_recovered",
    "filter_logits",
    "apply_penalties",
    "logprob_rank",
    "topn_gather",
    # trees and draft inputs
    "build_tree",
    "prepare_inputs",
    "prepare_next_token",
    "next_step_slots",
    "shift_append",
    "copy_and_expand",
    # bookkeeping
    "expand_per_request",
    "assign_draft_slots",
    "assign_extend_slots",
    "copy_request_slots",
    "compact_accepted_slots",
    "move_kv_rows",
    "fill_bonus_tokens",
    "align_evict_mask",
    "draft_kv_indices",
    # output and attention
    "gather_hidden_rows",
    "paged_attention",
)
