"""What a verification returns, for chains and trees alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Verdict:
    """`emitted` [N, num_steps + 1]: accepted drafts, then the bonus (or recovered) token, then -1. `accept_lens` [N] =
    accepted drafts + 1. `accept_index` [N, num_steps + 1]: window nodes of the accepted path, root (0) first, then -1;
    the hidden row of node accept_index[j] is the one that predicted emitted[j]. `stuck` [N], where masks make it
    possible: after the accepted drafts no token was left to choose, and the last of `emitted` means nothing."""

    emitted: torch.Tensor
    accept_lens: torch.Tensor
    accept_index: torch.Tensor
    stuck: torch.Tensor | None = None
