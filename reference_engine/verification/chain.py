"""Verification of chains: greedy, and rejection sampling (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import torch

from reference_engine.sampling.processors import sample
from reference_engine.verification.base import Verdict


def verify_chain_greedy(draft_tokens: torch.Tensor, target_argmax: torch.Tensor) -> Verdict:
    """Accept the leading drafts that equal the target's choice, then emit the target's choice after them.

    draft_tokens [N, k] int64, -1 = no draft (never accepted); target_argmax [N, k + 1]: the target's choice after the
    root and after each draft.
    """
    accepted = (draft_tokens == target_argmax[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    return _verdict(target_argmax, accepted)


def verify_chain_sampled(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    accept_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
) -> Verdict:
    """Rejection sampling: draft d_j stays while u_j * q_j(d_j) < p_j(d_j); the first rejected position is drawn again
    from the normalised max(p - q, 0); after k accepted drafts the bonus token is drawn from p_k.

    draft_tokens [N, k] int64, -1 = no draft: the chain ends there and its token is drawn from p. draft_probs [N, k, V]
    or None for drafts that were chosen without chance (q one-hot). target_probs [N, k + 1, V]. accept_uniform [N, k],
    final_uniform [N, k + 1] in [0, 1), the latter indexed by the position of the token that it decides.
    """
    num_drafts = draft_tokens.shape[1]
    missing = draft_tokens < 0
    index = draft_tokens.clamp(min=0)[:, :, None]
    if draft_probs is None:
        draft_probs = torch.zeros_like(target_probs[:, :-1]).scatter_(-1, index, 1.0)
    draft_probs = draft_probs.masked_fill(missing[:, :, None], 0.0)
    p = target_probs[:, :-1].gather(-1, index)[:, :, 0]
    q = draft_probs.gather(-1, index)[:, :, 0]
    kept = (accept_uniform * q < p) & ~missing
    accepted = kept.long().cumprod(dim=1).sum(dim=1)
    residual = (target_probs[:, :-1] - draft_probs).clamp(min=0)
    # Rounding can leave nothing of a residual only where p and q agree; p itself is then right.
    empty = residual.sum(-1, keepdim=True) <= 0
    final_probs = torch.cat([torch.where(empty, target_probs[:, :-1], residual), target_probs[:, -1:]], dim=1)
    final = sample(final_probs, final_uniform)
    padded = torch.cat([draft_tokens, draft_tokens.new_full((len(draft_tokens), 1), -1)], dim=1)
    at_end = torch.arange(num_drafts + 1, device=final.device) == accepted[:, None]
    return _verdict(torch.where(at_end, final, padded), accepted)


def _verdict(tokens: torch.Tensor, accepted: torch.Tensor) -> Verdict:
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    kept = columns <= accepted[:, None]
    return Verdict(torch.where(kept, tokens, -1), accepted + 1, torch.where(kept, columns, -1))
