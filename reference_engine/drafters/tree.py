"""Growing a draft tree from a drafter's logits (EAGLE-2: expand the best, rerank all; Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from reference_engine.pool import PLACEHOLDER


class TreeBuilder:
    """Candidates are numbered in the order in which they appear: topk children of the root, then topk * topk a step.

    `tokens` [N, topk] and `features` [N, topk, width] are the frontier: the nodes to feed next. The node fed as b-th of
    step s sits in scratch position (s - 1) * topk + b of the draft window.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        features: torch.Tensor,
        topk: int,
        num_steps: int,
        to_target_ids: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.topk = topk
        self._to_target_ids = to_target_ids
        scores, ids = _best(logits.log_softmax(-1), topk)
        rows = len(logits)
        self.tokens = to_target_ids(ids)
        self.features = features[:, None].expand(-1, topk, -1)
        self._frontier_scores = scores
        self._frontier = torch.arange(topk, device=ids.device).expand(rows, topk)
        self._visible = torch.zeros(rows, topk, topk * max(num_steps - 1, 1), dtype=torch.bool, device=ids.device)
        self._scores, self._ids = [scores], [self.tokens]
        self._parents = [torch.full_like(ids, PLACEHOLDER)]
        self._depths = [torch.ones_like(ids)]

    def window_mask(self, step: int) -> torch.Tensor:
        """[N, topk, scratch]: what the frontier fed at `step` sees of the scratch: its ancestors and itself."""
        first = (step - 1) * self.topk
        own = torch.eye(self.topk, dtype=torch.bool, device=self._visible.device)
        self._visible[:, :, first : first + self.topk] |= own
        return self._visible

    def expand(self, logits: torch.Tensor, features: torch.Tensor, step: int) -> None:
        """Logits [N, topk, V_d] and feature rows of the frontier give topk children each; the best become the next."""
        topk = logits.shape[1]
        scores, ids = _best(logits.log_softmax(-1), topk)
        scores = (self._frontier_scores[:, :, None] + scores).flatten(1)
        tokens = self._to_target_ids(ids).flatten(1)
        first = topk + (step - 1) * topk * topk
        self._scores.append(scores)
        self._ids.append(tokens)
        self._parents.append(self._frontier.repeat_interleave(topk, dim=1))
        self._depths.append(torch.full_like(tokens, step + 1))
        self._frontier_scores, best = _best(scores, topk)
        parent = best // topk
        self._frontier = first + best
        self.tokens = tokens.gather(1, best)
        self.features = features.gather(1, parent[:, :, None].expand(-1, -1, features.shape[2]))
        self._visible = self._visible.gather(1, parent[:, :, None].expand(-1, -1, self._visible.shape[2]))

    def select(
        self, count: int, limits: torch.Tensor | None = None, depths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` best candidates, parents before children -> token ids [N, count], parents [N, count] as node
        indices (0 = root, candidate j of the selection = node j + 1). A row keeps its `limits` [N] best of them, and
        none deeper than `depths` [N]; the others become PLACEHOLDER."""
        scores, ids = torch.cat(self._scores, 1), torch.cat(self._ids, 1)
        parents = torch.cat(self._parents, 1)
        if depths is not None:
            scores = scores.masked_fill(torch.cat(self._depths, 1) > depths[:, None], float("-inf"))
        # A stable sort keeps a parent before its children even where their scores are equal.
        chosen, rank = _best(scores, count)[1].sort(dim=1)
        node_of = torch.zeros_like(parents).scatter_(
            1, chosen, torch.arange(1, count + 1, device=chosen.device).expand_as(chosen)
        )
        parent = parents.gather(1, chosen)
        parent_node = torch.where(parent < 0, 0, node_of.gather(1, parent.clamp(min=0)))
        impossible = scores.gather(1, chosen).isneginf()
        if limits is not None:
            impossible |= rank >= limits[:, None]
        return ids.gather(1, chosen).masked_fill(impossible, PLACEHOLDER), parent_node


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest along the last dim, ties to the lower index, -inf filled up where there are too few."""
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    if scores.shape[-1] < count:
        pad = count - scores.shape[-1]
        values = torch.cat([values, values.new_full((*values.shape[:-1], pad), float("-inf"))], -1)
        order = torch.cat([order, order[..., :1].expand(*order.shape[:-1], pad)], -1)
    return values[..., :count], order[..., :count]
