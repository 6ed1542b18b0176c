"""Verification of chains: greedy, and rejection sampling (Leviathan et al. 2023; Chen et al. 2023). The steps are those
of `kernels.verify_chain_greedy` and `kernels.verify_chain_sampled`, which tell shapes and rules."""

from __future__ import annotations

import torch

from kernels import verify_chain_greedy as greedy
from kernels import verify_chain_sampled as sampled
from kernels.base import Backend
from reference_engine.verification.base import Verdict


def verify_chain_greedy(draft_tokens: torch.Tensor, target_argmax: torch.Tensor, backend: Backend = "torch") -> Verdict:
    """Accept the leading drafts [N, k] that equal the target's choice [N, k + 1], then emit the target's choice."""
    return _verdict(*greedy.verify_chain_greedy(draft_tokens, target_argmax, backend=backend))


def verify_chain_sampled(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    accept_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
    backend: Backend = "torch",
) -> Verdict:
    """Rejection sampling of drafts [N, k] against laws [N, k + 1, V]."""
    arguments = (draft_tokens, draft_probs, target_probs, accept_uniform, final_uniform)
    return _verdict(*sampled.verify_chain_sampled(*arguments, backend=backend))


def _verdict(emitted: torch.Tensor, accept_lens: torch.Tensor) -> Verdict:
    """The path of a chain is its first nodes."""
    columns = torch.arange(emitted.shape[1], device=emitted.device)
    return Verdict(emitted, accept_lens, columns.masked_fill(columns >= accept_lens[:, None], -1))
