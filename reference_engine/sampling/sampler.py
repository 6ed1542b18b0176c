"""From logits to emitted tokens: the first token after a prefill, and the verification of a window of drafts."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from kernels.build_tree import Tree
from reference_engine.pool import RequestPool
from reference_engine.sampling.bad_words import output_tails
from reference_engine.sampling.processors import History, SamplingBatch, adjust_logits, draw, probabilities
from reference_engine.sampling.random import RandomSource, Stream
from reference_engine.verification.base import Verdict
from reference_engine.verification.chain import verify_chain_greedy, verify_chain_sampled
from reference_engine.verification.tree import verify_tree_greedy, verify_tree_sampled


class Window:
    """The rows [N] of a launch with what their logits follow: the first `num_drafts` drafts of each, all unless told
    otherwise. `tree` is set for draft trees, `permitted` bool [N, Q, V] where grammars say what may follow each row of
    logits."""

    def __init__(self, pool: RequestPool, rows: torch.Tensor, sampling: SamplingBatch, random: RandomSource) -> None:
        self.pool = pool
        self.rows = rows
        self.sampling = sampling
        self.random = random
        self.tree: Tree | None = None
        self.permitted: torch.Tensor | None = None
        self.num_drafts = pool.draft_tokens.shape[1]

    @property
    def drafts(self) -> torch.Tensor:
        return self.pool.draft_tokens[self.rows, : self.num_drafts]

    def uniform(self, positions: torch.Tensor, stream: int) -> torch.Tensor:
        return self.random.uniform(self.sampling.seeds, positions, stream)

    def history(self, drafts: torch.Tensor | None, vocab_size: int) -> History | None:
        """What every logits row follows: committed tokens and, for drafts [N, n - 1], the path to the row."""
        sampling, pool, rows = self.sampling, self.pool, self.rows
        bad_words = sampling.bad_words
        if not sampling.penalised and sampling.min_new_tokens is None and bad_words is None:
            return None
        num_output = (pool.seq_lens[rows] - pool.prompt_lens[rows])[:, None]
        steps = torch.zeros_like(num_output)
        if drafts is not None:
            steps = torch.arange(drafts.shape[1] + 1, device=rows.device)
            if self.tree is not None:
                steps = self.tree.positions - self.tree.positions[:, :1]
        tokens = pool.token_ids[rows]
        column = torch.arange(tokens.shape[1], device=rows.device)
        in_prompt = column < pool.prompt_lens[rows][:, None]
        in_output = (column < pool.seq_lens[rows][:, None]) & ~in_prompt
        zeros = torch.zeros(len(rows), vocab_size, device=rows.device)
        prompt_counts = zeros.scatter_add(1, tokens, in_prompt.float())[:, None]
        output_counts = zeros.scatter_add(1, tokens, in_output.float())[:, None]
        if drafts is not None:
            hot = torch.zeros(len(rows), drafts.shape[1], vocab_size, device=rows.device)
            hot.scatter_(2, drafts.clamp(min=0)[:, :, None], (drafts >= 0).float()[:, :, None])
            if self.tree is not None:
                on_path = self.tree.mask[:, :, 1:].float() @ hot
            else:
                on_path = F.pad(hot.cumsum(1), (0, 0, 1, 0))
            output_counts = output_counts + on_path
        tails = None
        if bad_words is not None:
            tails = output_tails(pool, rows, drafts, self.tree, bad_words.length)
        return History(prompt_counts, output_counts, num_output + steps, tails)

    def adjusted(self, logits: torch.Tensor, drafts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Raw logits [N, Q, V] -> adjusted ones, and bool [N, Q]: nothing is left of the row (None: impossible)."""
        sampling = self.sampling
        adjusted = adjust_logits(logits, sampling, self.history(drafts, logits.shape[-1]), self.permitted)
        masked = sampling.masks or self.permitted is not None
        return adjusted, adjusted.isneginf().all(-1) if masked else None


def sample_next(logits: torch.Tensor, window: Window) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Raw logits [N, 1, V] after the committed tokens -> ids [N, 1], and bool [N]: there was none to choose."""
    sampling = window.sampling
    adjusted, empty = window.adjusted(logits, None)
    stuck = None if empty is None else empty[:, 0]
    if sampling.all_greedy:
        return adjusted.argmax(-1), stuck
    positions = window.pool.seq_lens[window.rows][:, None]
    coin = window.uniform(positions, Stream.FINAL)[:, 0]
    return draw(probabilities(adjusted, sampling)[:, 0], coin, sampling.backend)[:, None], stuck


def verify(logits: torch.Tensor, drafts: torch.Tensor, window: Window, max_accept_len: int) -> Verdict:
    """Raw logits [N, n, V] after the root and after each draft [N, n - 1] -> what is emitted.

    The token that row j decides has position seq_len + depth of j; random numbers are keyed by it.
    """
    adjusted, empty = window.adjusted(logits, drafts)
    verdict = _verdict(adjusted, empty, drafts, window, max_accept_len)
    if empty is None:
        return verdict
    last = verdict.accept_index.gather(1, verdict.accept_lens[:, None] - 1)
    emitted = verdict.emitted.masked_fill(verdict.emitted == logits.shape[-1], 0)
    return replace(verdict, emitted=emitted, stuck=empty.gather(1, last)[:, 0])


def _verdict(
    adjusted: torch.Tensor, empty: torch.Tensor | None, drafts: torch.Tensor, window: Window, max_accept_len: int
) -> Verdict:
    sampling, tree = window.sampling, window.tree
    if sampling.all_greedy:
        choice = adjusted.argmax(-1)
        if empty is not None:
            # An id outside the vocabulary: no draft is accepted where nothing may come.
            choice = choice.masked_fill(empty, adjusted.shape[-1])
        if drafts.shape[1] == 0:
            return Verdict(choice, torch.ones_like(choice[:, 0]), torch.zeros_like(choice))
        if tree is None:
            return verify_chain_greedy(drafts, choice, sampling.backend)
        return verify_tree_greedy(drafts, tree, choice, max_accept_len, sampling.backend)
    probs = probabilities(adjusted, sampling)
    depth = torch.arange(max_accept_len, device=adjusted.device)
    positions = window.pool.seq_lens[window.rows][:, None] + depth
    final = window.uniform(positions, Stream.FINAL)
    if tree is None:
        probs_pool = window.pool.draft_probs
        draft_probs = None if probs_pool is None else probs_pool[window.rows, : drafts.shape[1]]
        accept = window.uniform(positions[:, :-1], Stream.SIBLING)
        return verify_chain_sampled(drafts, draft_probs, probs, accept, final, sampling.backend)
    siblings = [window.uniform(positions, Stream.SIBLING + i) for i in range(drafts.shape[1])]
    coins = (torch.stack(siblings, dim=2), final)
    return verify_tree_sampled(drafts, tree, probs, *coins, max_accept_len, sampling.backend)
