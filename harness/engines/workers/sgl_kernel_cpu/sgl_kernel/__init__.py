"""A stand-in for `sgl_kernel`, SGLang's package of compiled kernels, on CPUs for which no build of it exists.

What it is: the kernels that SGLang calls for speculative decoding on a CPU, in plain PyTorch, slow and readable, under
the names and with the arguments that SGLang's call sites use. What it is not: SGLang's kernels, of which it holds no
line. A check that passes on an engine with this module says nothing about those; scheduler, workers, memory pools,
verification around the kernels, logits, logprobs and hidden states are SGLang's own.

Results go into tensors that the caller made, unless a docstring says otherwise.
"""

import torch

from .attention import decode_attention_cpu, extend_attention_cpu
from .slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
)
from .tokens import fill_bonus_tokens_cpu, rotate_input_ids_cpu
from .tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

# SGLang looks for these two among the operators, not in the module.
for operator in (decode_attention_cpu, extend_attention_cpu):
    setattr(torch.ops.sgl_kernel, operator.__name__, operator)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
