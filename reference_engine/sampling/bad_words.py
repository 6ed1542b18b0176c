"""Token sequences that must not come up: their last id is banned where the output ends in the ids before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.build_tree import Tree
from reference_engine.pool import PLACEHOLDER, RequestPool

ANY = -2
"""In a beginning that is shorter than the longest one: whatever stands there."""


@dataclass(slots=True)
class BadWords:
    """The words of a batch: `rows` [W], whose they are; `beginnings` [W, L], all ids but the last, aligned to the right
    and filled up with ANY; `endings` [W], the last ids."""

    rows: torch.Tensor
    beginnings: torch.Tensor
    endings: torch.Tensor

    @classmethod
    def of(cls, words: Sequence[Sequence[Sequence[int]]], device: torch.device) -> BadWords | None:
        """Bad words by row; None when there are none."""
        flat = [(row, list(word)) for row, mine in enumerate(words) for word in mine]
        if not flat:
            return None
        length = max(len(word) for _, word in flat) - 1
        beginnings = [[ANY] * (length - len(word) + 1) + word[:-1] for _, word in flat]
        return cls(
            rows=torch.tensor([row for row, _ in flat], device=device),
            beginnings=torch.tensor(beginnings, dtype=torch.long, device=device).view(len(flat), length),
            endings=torch.tensor([word[-1] for _, word in flat], device=device),
        )

    @property
    def length(self) -> int:
        """Ids of the longest beginning."""
        return self.beginnings.shape[1]

    def banned(self, tails: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """`output_tails` [N, Q, length] -> the ids that would complete a word, bool [N, Q, V]."""
        beginnings = self.beginnings[:, None]
        begun = ((tails[self.rows] == beginnings) | (beginnings == ANY)).all(-1)
        hits = torch.zeros(*tails.shape[:2], vocab_size, dtype=torch.int32, device=tails.device)
        queries = torch.arange(tails.shape[1], device=tails.device)
        hits.index_put_((self.rows[:, None], queries, self.endings[:, None]), begun.int(), accumulate=True)
        return hits > 0


def output_tails(
    pool: RequestPool, rows: torch.Tensor, drafts: torch.Tensor | None, tree: Tree | None, length: int
) -> torch.Tensor:
    """The last `length` output tokens before each logits row [N, Q, length]: committed ones, then the drafts [N, Q - 1]
    on the way to the row. PLACEHOLDER where the output does not reach back so far."""
    columns = pool.seq_lens[rows][:, None] + torch.arange(-length, 0, device=rows.device)
    in_output = columns >= pool.prompt_lens[rows][:, None]
    committed = pool.token_ids[rows].gather(1, columns.clamp(min=0))
    tails = torch.where(in_output, committed, PLACEHOLDER)[:, None]
    if drafts is None:
        return tails
    row = torch.arange(len(rows), device=rows.device)
    for draft in range(drafts.shape[1]):
        parent = draft if tree is None else tree.parents[:, draft].clamp(min=0)
        longer = F.pad(tails[row, parent], (0, 1))
        longer[:, -1] = drafts[:, draft]
        tails = torch.cat([tails, longer[:, None, 1:]], dim=1)
    return tails
