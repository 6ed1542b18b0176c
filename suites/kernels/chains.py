"""Chains of drafts for the samplers that verify them, and what every verified block must be."""

from __future__ import annotations

import torch

from suites.kernels.rows import probabilities, uniforms
from suites.kernels.support import generator

Args = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]


def chain(rows: int, k: int, vocab: int, seed: int, *, with_probs: bool = True, hostile: bool = True) -> Args:
    """Drafts with -1 and ids outside the vocabulary among them; some rows of q equal those of p."""
    rng = generator(seed)
    p = probabilities((rows, k + 1, vocab), seed, hostile)
    q = probabilities((rows, k, vocab), seed + 1, hostile)
    alike = torch.rand(rows, k, 1, generator=rng) < 0.4
    q = torch.where(alike, p[:, :-1], q)
    drafts = torch.randint(-1, vocab + 1, (rows, k), generator=rng) if hostile else torch.randint(0, vocab, (rows, k))
    likely = p[:, :-1].nan_to_num(0).argmax(-1)
    drafts = torch.where(torch.rand(rows, k, generator=rng) < 0.5, likely, drafts)
    return drafts, q if with_probs else None, p, uniforms((rows, k), seed + 2), uniforms((rows, k + 1), seed + 3)


def check_block(args: Args, emitted: torch.Tensor, accept_lens: torch.Tensor) -> None:
    """Ids inside the vocabulary up to the accept length, then -1; the id that ends a block is not the rejected one."""
    drafts, _, p, *_ = args
    vocab, k = p.shape[2], drafts.shape[1]
    kept = torch.arange(k + 1, device=emitted.device) < accept_lens[:, None]
    assert (accept_lens >= 1).all()
    assert torch.equal((emitted >= 0) & (emitted < vocab), kept)
    assert (emitted[~kept] == -1).all()
    ended = accept_lens <= k
    last = accept_lens[ended] - 1
    if vocab > 1:
        assert (emitted[ended, last] != drafts[ended, last]).all()
