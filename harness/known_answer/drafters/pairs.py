"""What the EAGLE, EAGLE3 and MTP drafters of a Markov target compute, whatever their layout.

A draft row is fed the hidden row of a token p and the embedding of the token x that follows it. A table names, for
each pair (p, x) that may follow one another, the token z that the drafter takes for the current one: x itself, or
another token where it is meant to err. The drafter then drafts the successor of z, and its output row stands for z. A
pair outside the table (a stale, shifted or foreign row) gives a wrong draft.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from harness.known_answer.base import require_history
from harness.known_answer.markov import MarkovTarget


@dataclass(frozen=True, slots=True)
class PairTable:
    """`meaning[(p, x)]` is z. `decoy[p]` is the token whose successor is drafted when the pair is not in the table."""

    meaning: dict[tuple[int, int], int]
    decoy: tuple[int, ...]


def impostor(target: MarkovTarget, token: int, forbidden: Collection[int] = ()) -> int:
    """A token half the vocabulary further with another successor, which is not in `forbidden`."""
    size = target.vocab_size
    for step in range(size):
        other = (token + size // 2 + step) % size
        successor = target.successors[other]
        if other != target.eos_token_id and successor not in {target.successors[token], *forbidden}:
            return other
    raise ValueError(f"token={token}: every other token has the same successor; choose a law with more variety")


def walk_pairs(target: MarkovTarget, errs_on: Collection[int], forbidden: Collection[int] = ()) -> PairTable:
    """Table of a deterministic walk: only (p, successor of p) occurs. A draft is wrong exactly after a token in
    `errs_on`, or when the right draft is in `forbidden` (outside a reduced draft vocabulary)."""
    meaning = {}
    for before, token in enumerate(target.successors):
        errs = token in errs_on or target.successors[token] in forbidden
        meaning[before, token] = impostor(target, token, forbidden) if errs else token
    return PairTable(meaning, _decoys(target))


def law_pairs(target: MarkovTarget, errs_on: Collection[int], forbidden: Collection[int] = ()) -> PairTable:
    """Table of a soft law: every pair occurs. The drafter errs after a token in `errs_on` that follows an even one, so
    that its drafts depend on the hidden row as well as on the embedding."""
    meaning = {}
    for before in range(target.vocab_size):
        for token in range(target.vocab_size):
            errs = (token in errs_on and before % 2 == 0) or target.successors[token] in forbidden
            meaning[before, token] = impostor(target, token, forbidden) if errs else token
    return PairTable(meaning, _decoys(target))


def _decoys(target: MarkovTarget) -> tuple[int, ...]:
    size = target.vocab_size
    return tuple((token + size // 2 - 1) % size for token in range(size))


def draft_pairs(table: PairTable, target: MarkovTarget, tokens: Sequence[int], k: int) -> tuple[int, ...]:
    """Greedy drafts of a drafter whose output row has the form of a target row (EAGLE, MTP)."""
    require_history(tokens, 2, "EAGLE and MTP")
    before, token = tokens[-2:]
    drafts: list[int] = []
    for _ in range(k):
        meaning = table.meaning.get((before, token))
        read = table.decoy[before] if meaning is None else meaning
        before = token if meaning is None else meaning
        token = target.successors[read]
        drafts.append(token)
    return tuple(drafts)
