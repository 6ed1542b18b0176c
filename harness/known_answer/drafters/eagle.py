"""EAGLE: one decoder layer behind `fc(cat(embedding of t[j+1], target hidden row of t[j]))`.

No input norm in the layer, no final norm; hidden + residual is the next feature and what the target's lm_head reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch

from harness.known_answer import blocks
from harness.known_answer.base import Config, Drafter, Target, Weights
from harness.known_answer.blocks import Constant, Entry, Passage, Shape
from harness.known_answer.census import ROPE_THETA, SQUARED_NORM, CensusTarget
from harness.known_answer.drafters import rows
from harness.known_answer.drafters.pairs import PairTable, draft_pairs
from harness.known_answer.drafters.rows import CensusRule
from harness.known_answer.markov import MarkovTarget, code_move


def eagle_config(target: Target, shape: Shape, dtype: torch.dtype) -> Config:
    config = blocks.base_config(shape, target.eos_token_id, dtype)
    return config | {"architectures": ["LlamaForCausalLMEagle"]}


class MarkovEagle(Drafter):
    """Draft row: `[x | p]`. Attention turns p into the code of its decoy, the MLP the whole into the row of z."""

    method = "EAGLE"

    def __init__(self, target: MarkovTarget, table: PairTable) -> None:
        self.target, self.table, self._markov = target, table, target
        shape = dataclasses.replace(target.shape, num_layers=1, intermediate_size=len(table.meaning))
        self.config = eagle_config(target, shape, target.dtype)
        self.weights = blocks.stored(self._weights(shape), target.dtype)

    def _weights(self, shape: Shape) -> Weights:
        size, codes = shape.vocab_size, self._markov.final_codes
        fc = torch.zeros(shape.hidden_size, 2 * shape.hidden_size, dtype=torch.float64)
        for token in range(size):
            fc[token, token] = 1.0
            fc[size + token, shape.hidden_size + token] = 1.0
        entries = [pair_entry(self.table, codes, pair) for pair in self.table.meaning]
        return {
            "embed_tokens.weight": self.target.weights["model.embed_tokens.weight"].clone(),
            "fc.weight": fc,
            **decoy_attention("layers.0.self_attn", shape, self.table, codes),
            **blocks.table_mlp("layers.0.mlp", shape, entries, slice(0, size)),
            "layers.0.post_attention_layernorm.weight": blocks.norm(shape),
        }

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        return draft_pairs(self.table, self._markov, tokens, k)


class CensusEagle(Drafter):
    """Draft row: see `rows`. The layer's attention fills in the histogram and the lagged token, its MLP the code."""

    method = "EAGLE"

    def __init__(self, target: CensusTarget, errs_on: Collection[int] = ()) -> None:
        self.target = target
        self.rule = CensusRule.build(target, errs_on)
        shape = dataclasses.replace(target.shape, num_layers=1, intermediate_size=len(self.rule.pairs))
        self.config = eagle_config(target, shape, target.dtype) | {"rope_theta": ROPE_THETA}
        self.weights = blocks.stored(self._weights(shape), target.dtype)

    def _weights(self, shape: Shape) -> Weights:
        tokens, prefix = range(shape.vocab_size), "layers.0.self_attn"
        attention = blocks.attention(prefix, shape)
        rows.add_row_heads(attention, prefix, self.rule)
        entries = rows.pair_entries(self.rule, tokens)
        return {
            "embed_tokens.weight": self.target.weights["model.embed_tokens.weight"].clone(),
            "fc.weight": rows.merge_projection(self.rule, 0, shape.hidden_size, tokens, tokens),
            **attention,
            **blocks.table_mlp("layers.0.mlp", shape, entries, slice(0, shape.vocab_size)),
            "layers.0.post_attention_layernorm.weight": blocks.norm(shape, SQUARED_NORM),
        }

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        return self.rule.draft(tokens, k)


def decoy_attention(
    prefix: str, shape: Shape, table: PairTable, codes: Sequence[int], *, bias: bool = False
) -> Weights:
    """Attention whose heads look at their own row and turn p, in the second block, into the code of its decoy."""
    size = shape.vocab_size
    passages = [Passage(size + token, code_move(size, token, codes[table.decoy[token]])) for token in range(size)]
    weights = blocks.attention(prefix, shape, bias=bias)
    blocks.add_own_row_heads(weights, prefix, shape, passages, Constant(slice(0, size)))
    return weights


def pair_entry(table: PairTable, codes: Sequence[int], pair: tuple[int, int]) -> Entry:
    """The table entry that turns `[x | code of the decoy of p]` into `[z | code of z]`."""
    before, token = pair
    size, meaning = len(codes), table.meaning[pair]
    decoy = size + codes[table.decoy[before]]
    return Entry((token, decoy), ((token, -1.0), (decoy, -1.0), (meaning, 1.0), (size + codes[meaning], 1.0)))
