"""What the EAGLE, EAGLE3 and MTP drafters of a census target compute, whatever their layout.

A draft row is fed the hidden row of a token p and the embedding of the token x that follows it. Its own attention
counts the p of all rows that it sees, and copies the p of the row LAG - 1 back: from the draft KV alone it knows the
histogram and the lagged token that the target will see at x. (It does not count x, which never follows itself.) A table
holds the pairs (p, x) that may follow one another; outside it (a stale, shifted or foreign row) the drafter takes x for
a token of another alphabet.

A drafter marks its output rows. A marked row at distance LAG - 1 makes it draft EOS: up to LAG steps this happens only
when the draft KV of accepted tokens was never recomputed from the target's rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from harness.known_answer.base import Weights, require_history
from harness.known_answer.blocks import Entry
from harness.known_answer.census import (
    ALARM,
    HEAD_DIM,
    LAG,
    NUM_HEADS,
    NUM_KV_HEADS,
    Alphabets,
    CensusTarget,
    add_census_heads,
    erring_meaning,
)


@dataclass(frozen=True, slots=True)
class CensusRule:
    """`meaning[x]` is the token whose successors are drafted after x, `decoy[x]` the same for a pair that does not fit.

    `draft_vocab` holds ascending target ids.
    """

    target: CensusTarget
    meaning: tuple[int, ...]
    decoy: tuple[int, ...]
    draft_vocab: tuple[int, ...]

    @classmethod
    def build(
        cls, target: CensusTarget, errs_on: Collection[int], draft_vocab: Sequence[int] | None = None
    ) -> CensusRule:
        """A rule that errs after the tokens in `errs_on`. Raises ValueError for a target with a single owner."""
        alphabets = target.alphabets
        if len(alphabets.members) < 2:
            raise ValueError("owners=1: a census drafter needs a second alphabet for its wrong drafts")
        vocab = tuple(range(target.vocab_size)) if draft_vocab is None else tuple(draft_vocab)
        for pairs in alphabets.successors:
            if any(not set(pair).intersection(vocab) for pair in pairs) or target.eos_token_id not in vocab:
                raise ValueError(f"draft_vocab={vocab!r}: must hold EOS and at least one of each pair in {pairs}")
        return cls(target, erring_meaning(alphabets, errs_on), decoys(alphabets), vocab)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs (p, x) that fit."""
        alphabets = self.target.alphabets
        return [(p, x) for p in range(self.target.vocab_size) for x in sorted(alphabets.followers(p))]

    def choose(self, stand_in: int, lagged: int, fed: Sequence[int]) -> int:
        """Draft after a token taken for `stand_in`: of a pair, the one that can be drafted when the other cannot."""
        alphabets = self.target.alphabets
        best = alphabets.choose(stand_in, lagged, fed)
        if best in self.draft_vocab:
            return best
        return next(token for token in alphabets.successors[stand_in][alphabets.calls[lagged]] if token != best)

    def counted(self, fed: Sequence[int], token: int) -> Sequence[int]:  # noqa: ARG002
        """The tokens whose use decides between a pair after `token`: those of the rows that attention sees."""
        return fed

    def draft(self, tokens: Sequence[int], k: int, num_layers: int = 1) -> tuple[int, ...]:
        """Greedy drafts. With `num_layers` MTP layers, row j of layer i was fed t[j+i] as p, and only layer 0 heeds
        marks (the later layers are always fed by a drafter)."""
        require_history(tokens, 2, "EAGLE, EAGLE3 and MTP")
        known = list(tokens)
        drafts: list[int] = []
        for step in range(k):
            layer = min(step, num_layers - 1)
            fed, token = known[layer:-1], known[-1]
            back = max(0, len(fed) - LAG)
            if num_layers == 1 and back > len(tokens) - 2:
                draft = self.target.eos_token_id
            else:
                fits = token in self.target.alphabets.followers(fed[-1])
                stand_in = self.meaning[token] if fits else self.decoy[token]
                draft = self.choose(stand_in, fed[back], self.counted(fed, token))
            drafts.append(draft)
            known.append(draft)
        return tuple(drafts)


def decoys(alphabets: Alphabets) -> tuple[int, ...]:
    """For each token one of the next alphabet; for EOS the first token of all."""
    members = alphabets.members
    return tuple(
        members[0][0] if owner is None else members[(owner + 1) % len(members)][members[owner].index(token)]
        for token, owner in enumerate(alphabets.owner)
    )


def merge_projection(
    rule: CensusRule, embedding: int, feature: int, read: Sequence[int], write: Sequence[int]
) -> torch.Tensor:
    """Projection of (embedding of x, fed row) to the draft row `[x | 0 | 0 | code of the decoy of x | p | marks]`,
    float64 [H, 2H]. `embedding` and `feature` are the columns where the two start; `read` and `write` label the current
    token in the fed row and in the draft row."""
    layout, codes = rule.target.layout, rule.target.final_codes
    width = rule.target.shape.hidden_size
    merge = torch.zeros(width, 2 * width, dtype=torch.float64)
    for token in range(layout.vocab_size):
        merge[layout.current + write[token], embedding + layout.current + token] = 1.0
        merge[layout.code + codes[rule.decoy[token]], embedding + layout.current + token] = 1.0
        merge[layout.previous + token, feature + layout.current + read[token]] = 1.0
    for index in layout.constants:
        merge[index, embedding + index] = 1.0
    merge[layout.mark, embedding + layout.constants[-1]] = 0.5  # the last constant is 2
    merge[layout.fed_mark, feature + layout.mark] = 1.0
    return merge


def pair_entries(rule: CensusRule, write: Sequence[int]) -> list[Entry]:
    """Table entries that replace the code of the decoy of x by the code of its meaning when p and x fit."""
    layout, codes = rule.target.layout, rule.target.final_codes
    entries = []
    for before, token in rule.pairs:
        when = layout.current + write[token], layout.previous + before
        wrong, right = layout.code + codes[rule.decoy[token]], layout.code + codes[rule.meaning[token]]
        entries.append(Entry(when, ((wrong, -1.0), (right, 1.0))))
    return entries


def add_row_heads(weights: Weights, prefix: str, rule: CensusRule, marked: bool = True) -> None:
    """Count and look back over the fed tokens p; where `marked`, sound the alarm on a marked row."""
    layout = rule.target.layout
    add_census_heads(weights, prefix, layout, layout.previous, LAG - 1, rule.target.eos_token_id)
    if not marked:
        return
    lag_head, lag_query_head = 1, NUM_HEADS // NUM_KV_HEADS
    slot = layout.vocab_size  # the first value dimension behind the one-hot block
    weights[f"{prefix}.v_proj.weight"][lag_head * HEAD_DIM + slot, layout.fed_mark] = 1.0
    alarm = layout.histogram + rule.target.eos_token_id
    weights[f"{prefix}.o_proj.weight"][alarm, lag_query_head * HEAD_DIM + slot] = ALARM
