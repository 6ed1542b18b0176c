"""MEDUSA: heads on the hidden row that predicted the bonus token; vLLM's tensor names.

Head i drafts the token i + 1 places behind the bonus token, from the row of the token p before the bonus token alone:
`x + SiLU(W x + b)`, then its own `lm_head`. W and b are a lookup table, one unit an entry: where the ones in certain
blocks of the row are those that the entry wants, its place in the row grows by `HIT`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from harness.known_answer import blocks
from harness.known_answer.base import Config, Drafter, Target, Weights, require_history
from harness.known_answer.blocks import HIT
from harness.known_answer.census import BARRED, CONSTANTS, LAG, TIE, USAGE, CensusTarget, erring_meaning
from harness.known_answer.drafters.pairs import impostor
from harness.known_answer.markov import MarkovTarget

NUM_HEADS = 8
"""As many drafts as any workload asks for."""


def medusa_config(target: Target, dtype: torch.dtype) -> Config:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.config["hidden_size"],
        "vocab_size": target.vocab_size,
        "num_heads": NUM_HEADS,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "torch_dtype": blocks.DTYPE_NAMES[dtype],
    }


Wanted = Sequence[tuple[slice, Collection[int]]]
"""Blocks of a row, each of which holds one 1, and where in the row that may be."""


def table_block(width: int, entries: Mapping[int, Wanted]) -> tuple[torch.Tensor, torch.Tensor]:
    """W float64 [width, width] and b [width], by place: it grows by HIT when all of its blocks have their one where it
    is wanted, and not at all when any has it elsewhere."""
    matrix, bias = torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for place, wanted in entries.items():
        bias[place] = HIT
        for block, ones in wanted:
            matrix[place, block] = -2 * HIT
            matrix[place, list(ones)] = 0.0
    return matrix, bias


class MarkovMedusa(Drafter):
    """Row: `[p | code of p]`, both of which the table asks for. A head has the law of its token, as if the tokens since
    p were the greedy ones; after a token in `errs_on` it has that of another."""

    method = "MEDUSA"

    def __init__(self, target: MarkovTarget, errs_on: Collection[int] = ()) -> None:
        self.target, self._markov = target, target
        reached = list(range(target.vocab_size))
        self.stand_ins: list[tuple[int, ...]] = []
        """By head and p: the token whose successor is drafted."""
        for _ in range(NUM_HEADS):
            reached = [target.successors[token] for token in reached]
            self.stand_ins.append(tuple(impostor(target, x) if x in errs_on else x for x in reached))
        self.config = medusa_config(target, target.dtype)
        weights: Weights = {}
        for head in range(NUM_HEADS):
            weights |= self._head(head)
        self.weights = blocks.stored(weights, target.dtype)

    def _head(self, head: int) -> Weights:
        size, codes = self.target.vocab_size, self._markov.final_codes
        places = [(token + 1 + head) % size for token in range(size)]
        first, second = slice(0, size), slice(size, 2 * size)
        entries = {places[token]: ((first, [token]), (second, [size + codes[token]])) for token in range(size)}
        matrix, bias = table_block(2 * size, entries)
        projection = torch.zeros(size, 2 * size, dtype=torch.float64)
        projection[:, places] = self._markov.law[:, list(self.stand_ins[head])] / HIT
        # What the projection reads of p itself, which lies among the places, its code takes back.
        projection[:, [size + code for code in codes]] = -projection[:, :size]
        return head_weights(head, matrix, bias, projection)

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        require_history(tokens, 2, "MEDUSA")
        return tuple(self._markov.successors[self.stand_ins[head][tokens[-2]]] for head in range(k))


class CensusMedusa(Drafter):
    """A head guesses by p and by the kind that the lagged token in the row calls for: it takes the first of every pair
    to follow up to the token before its own, and drafts from a pair of that token's successors the one that the
    histogram in the row has less of. What decides the kind of its token has not entered the row.
    """

    method = "MEDUSA"
    guesses = True

    def __init__(self, target: CensusTarget, errs_on: Collection[int] = ()) -> None:
        self.target, self._census = target, target
        alphabets = target.alphabets
        meaning = erring_meaning(alphabets, errs_on)
        pairs = {
            (token, call): alphabets.successors[meaning[token]][call]
            for token in range(target.vocab_size)
            for call in (0, 1)
        }
        self.pairs: list[dict[tuple[int, int], tuple[int, int]]] = []
        """By head and (p, kind called for): the pair from which is drafted."""
        for _ in range(NUM_HEADS):
            pairs = {key: alphabets.successors[pair[0]][0] for key, pair in pairs.items()}
            self.pairs.append(pairs)
        self.config = medusa_config(target, target.dtype)
        weights: Weights = {}
        for head in range(NUM_HEADS):
            weights |= self._head(head)
        self.weights = blocks.stored(weights, target.dtype)

    def _head(self, head: int) -> Weights:
        layout, codes = self._census.layout, self._census.final_codes
        size, width = layout.vocab_size, self._census.shape.hidden_size
        callers = [[token for token in range(size) if self._census.alphabets.calls[token] == call] for call in (0, 1)]
        entries = {}
        projection = torch.zeros(size, width, dtype=torch.float64)
        for (token, call), (first, second) in self.pairs[head].items():
            # The code and the previous block have room for all, and the target leaves the second of them empty.
            place = layout.code + 2 * ((token + head) % size) + call
            entries[place] = (
                (layout.block(0), [layout.current + token]),
                (layout.block(3), [layout.code + codes[token]]),
                (layout.block(2), [layout.lagged + caller for caller in callers[call]]),
            )
            projection[:, place] = -BARRED / HIT
            projection[first, place], projection[second, place] = 0.0, -USAGE * TIE / HIT
        matrix, bias = table_block(width, entries)
        projection[:, layout.block(0)] = -projection[:, [layout.code + code for code in codes]]
        projection[:, layout.block(1)] = -USAGE * torch.eye(size, dtype=torch.float64)
        projection[:, layout.constants[-1]] = USAGE / len(self._census.alphabets.members[0]) / CONSTANTS[-1]
        return head_weights(head, matrix, bias, projection)

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        require_history(tokens, 2, "MEDUSA")
        fed = tokens[:-1]
        key = fed[-1], self._census.alphabets.calls[fed[max(0, len(fed) - 1 - LAG)]]
        return tuple(less_used(self.pairs[head][key], fed) for head in range(k))


def less_used(pair: tuple[int, int], fed: Sequence[int]) -> int:
    """The second of the pair where the first has come up more often in `fed`; see `Alphabets.choose`."""
    first, second = pair
    return second if fed.count(first) - fed.count(second) > TIE * len(fed) else first


def head_weights(head: int, matrix: torch.Tensor, bias: torch.Tensor, projection: torch.Tensor) -> Weights:
    return {
        f"blocks.{head}.layers.0.weight": matrix,
        f"blocks.{head}.layers.0.bias": bias,
        f"lm_heads.{head}.weight": projection,
    }
