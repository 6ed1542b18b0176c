"""EAGLE3: one decoder layer that reads three auxiliary states of the target, with an `lm_head` of its own.

Row j holds the feature `fc(cat(three auxiliary states of t[j]))` and the embedding of t[j+1]. Attention reads
`cat(input_layernorm(embedding), hidden_norm(feature))` (width 2H), the residual is the feature. `norm` comes before
`lm_head`; the recursion feeds back the sum before it. Auxiliary layer id i is the residual stream that enters layer i
of the target.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Sequence

import torch

from harness.known_answer import blocks
from harness.known_answer.base import Config, Drafter, Target, Weights, require_history
from harness.known_answer.blocks import Constant, Entry, Passage, Shape
from harness.known_answer.census import (
    ALARM,
    BAND,
    CONSTANTS,
    LAG,
    ROPE_THETA,
    SQUARED_NORM,
    USAGE,
    CensusTarget,
    Layout,
    class_scores,
    successor_scores,
)
from harness.known_answer.drafters.pairs import PairTable
from harness.known_answer.drafters.rows import CensusRule
from harness.known_answer.markov import MarkovTarget, permutation

AUX_LAYER_IDS = (1, 2, 3)
AUX_SHARES = (0.5, 0.25, 0.25)
"""How much each auxiliary state adds to the feature: the table fires only when all three name the same token."""


def eagle3_config(target: Target, shape: Shape, dtype: torch.dtype, draft_vocab_size: int) -> Config:
    return blocks.base_config(shape, target.eos_token_id, dtype) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYER_IDS),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in AUX_LAYER_IDS],
            "use_aux_hidden_state": True,
        },
    }


def vocabulary_maps(vocab_size: int, draft_vocab: Sequence[int]) -> Weights:
    """`d2t` int64 [draft V] (target id - draft id) and `t2d` bool [V]; nothing when the vocabularies are equal."""
    if list(draft_vocab) == list(range(vocab_size)):
        return {}
    ids = torch.tensor(draft_vocab)
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


PairBuilder = Callable[[MarkovTarget, Collection[int], Collection[int]], PairTable]


class MarkovEagle3(Drafter):
    """Feature: `[0 | sigma(p)]`. A head that looks at its own row adds x, the MLP turns `[x | sigma(p)]` into
    `[0 | sigma(z)]`. `draft_vocab` holds ascending target ids."""

    method = "EAGLE3"

    def __init__(self, target: MarkovTarget, table: PairTable, draft_vocab: Sequence[int], seed: int = 3) -> None:
        check_layers(target.shape)
        self.target, self.table, self._markov = target, table, target
        self.draft_vocab = tuple(draft_vocab)
        self.sigma = permutation(target.vocab_size, random.Random(seed))
        shape = dataclasses.replace(target.shape, num_layers=1, intermediate_size=2 * len(table.meaning))
        self.config = eagle3_config(target, shape, target.dtype, len(self.draft_vocab))
        self.weights = blocks.stored(self._weights(shape), target.dtype)
        head = self.weights["lm_head.weight"].double()
        columns = [target.vocab_size + self.sigma[token] for token in range(target.vocab_size)]
        best = head[:, columns].argmax(0).tolist()
        self._choice = tuple(self.draft_vocab[index] for index in best)

    def _weights(self, shape: Shape) -> Weights:
        size, width, target = shape.vocab_size, shape.hidden_size, self._markov
        fc = torch.zeros(width, 3 * width, dtype=torch.float64)
        head = torch.zeros(len(self.draft_vocab), width, dtype=torch.float64)
        for token in range(size):
            for part, (layer, share) in enumerate(zip(AUX_LAYER_IDS, AUX_SHARES, strict=True)):
                fc[size + self.sigma[token], part * width + size + target.codes[layer][token]] = share
            head[:, size + self.sigma[token]] = target.law[list(self.draft_vocab), token]
        entries = [self._entry(pair, size) for pair in self.table.meaning]
        return {
            "embed_tokens.weight": target.weights["model.embed_tokens.weight"].clone(),
            "fc.weight": fc,
            **embedding_attention("midlayer.self_attn", shape),
            **blocks.steady_table_mlp("midlayer.mlp", shape, entries, slice(0, size), missing=min(AUX_SHARES)),
            "midlayer.input_layernorm.weight": blocks.norm(shape),
            "midlayer.hidden_norm.weight": blocks.norm(shape, 1.0),
            "midlayer.post_attention_layernorm.weight": blocks.norm(shape),
            "norm.weight": blocks.norm(shape, 1.0),
            "lm_head.weight": head,
            **vocabulary_maps(size, self.draft_vocab),
        }

    def _entry(self, pair: tuple[int, int], size: int) -> Entry:
        (before, token), meaning = pair, self.table.meaning[pair]
        here, there = size + self.sigma[before], size + self.sigma[meaning]
        return Entry((token, here), ((token, -1.0), (here, -1.0), (there, 1.0)))

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        """A pair outside the table leaves p in the row for good: every further draft is then p's successor."""
        require_history(tokens, 2, "EAGLE3")
        before, token = tokens[-2:]
        lost = False
        drafts: list[int] = []
        for _ in range(k):
            lost = lost or (before, token) not in self.table.meaning
            before = before if lost else self.table.meaning[before, token]
            token = self._choice[before]
            drafts.append(token)
        return tuple(drafts)


def embedding_attention(prefix: str, shape: Shape) -> Weights:
    """Attention over `cat(embedding, feature)` whose heads look at their own row and add the embedding's token block.
    Queries come from the feature, keys from the embedding."""
    weights = blocks.attention(prefix, shape, input_size=2 * shape.hidden_size)
    size, width = shape.vocab_size, shape.hidden_size
    passages = [Passage(token, ((token, 1.0),)) for token in range(size)]
    feature = Constant(slice(width + size, width + 2 * size))
    blocks.add_own_row_heads(weights, prefix, shape, passages, feature, Constant(slice(0, size)))
    return weights


def markov_eagle3(
    target: MarkovTarget, pairs: PairBuilder, errs_on: Collection[int], draft_vocab: Sequence[int]
) -> MarkovEagle3:
    """A drafter that also errs wherever the right draft is not in `draft_vocab`."""
    outside = set(range(target.vocab_size)).difference(draft_vocab)
    return MarkovEagle3(target, pairs(target, errs_on, outside), draft_vocab)


class CensusEagle3(Drafter):
    """Feature: p, and (fed back) the histogram, kind, mark and stand-in of the row before, which the residual keeps.

    Attention writes what is new into blocks of its own; the MLP, linear but for the pair table, puts it in place of
    the old. `lm_head` reads the stand-in, the kind that the lagged token calls for, and the histogram.
    """

    method = "EAGLE3"

    def __init__(
        self, target: CensusTarget, errs_on: Collection[int] = (), draft_vocab: Sequence[int] | None = None
    ) -> None:
        check_layers(target.shape)
        self.target, self._census = target, target
        self.rule = CensusRule.build(target, errs_on, draft_vocab)
        self.places = Places(target.layout)
        self.units = len(self.rule.pairs) + len(self._passages())
        shape = dataclasses.replace(target.shape, num_layers=1, intermediate_size=self.units)
        config = eagle3_config(target, shape, target.dtype, len(self.rule.draft_vocab))
        self.config = config | {"rope_theta": ROPE_THETA}
        self.weights = blocks.stored(self._weights(shape), target.dtype)

    def _weights(self, shape: Shape) -> Weights:
        norm = blocks.norm(shape, SQUARED_NORM)
        return {
            "embed_tokens.weight": self.target.weights["model.embed_tokens.weight"].clone(),
            "fc.weight": self._fc(shape.hidden_size),
            **self._attention(shape),
            **self._mlp(shape),
            **{f"midlayer.{name}.weight": norm.clone() for name in MIDLAYER_NORMS},
            "norm.weight": norm,
            "lm_head.weight": self._head(shape.hidden_size),
            **vocabulary_maps(shape.vocab_size, self.rule.draft_vocab),
        }

    def _fc(self, width: int) -> torch.Tensor:
        layout, codes = self._census.layout, self._census.codes
        fc = torch.zeros(width, 3 * width, dtype=torch.float64)
        for part, (layer, share) in enumerate(zip(AUX_LAYER_IDS, AUX_SHARES, strict=True)):
            for token in range(layout.vocab_size):
                fc[self.places.fed + token, part * width + layout.code + codes[layer][token]] = share
            for index in layout.constants:
                fc[index, part * width + index] = share
        return fc

    def _attention(self, shape: Shape) -> Weights:
        """KV head 0 holds what the fed row says (p, the kind it calls for, its mark), KV head 1 the embedding."""
        prefix, size, dim, width = "midlayer.self_attn", shape.vocab_size, shape.head_dim, shape.hidden_size
        weights, places = blocks.attention(prefix, shape, input_size=2 * width), self.places
        back, key = blocks.lag_vectors(dim, LAG - 1, ROPE_THETA, BAND)
        own, _ = blocks.lag_vectors(dim, 0, ROPE_THETA, BAND)
        constant = self._census.layout.constants[-1]
        # Query head 0 is uniform, 1 looks back, both over KV head 0; query head 2 looks at its own row, KV head 1.
        q, k = weights[f"{prefix}.q_proj.weight"], weights[f"{prefix}.k_proj.weight"]
        q[dim : 2 * dim, constant], q[2 * dim : 3 * dim, constant] = back / CONSTANTS[-1], own / CONSTANTS[-1]
        k[:, constant] = key.repeat(shape.num_kv_heads) / CONSTANTS[-1]
        v, o = weights[f"{prefix}.v_proj.weight"], weights[f"{prefix}.o_proj.weight"]
        for token in range(size):
            v[token, width + places.fed + token] = 1.0
            v[size + self._census.alphabets.calls[token], width + places.fed + token] = 1.0
            v[dim + token, token] = 1.0
            o[places.new_histogram + token, token] = 1.0
            o[places.current + token, 2 * dim + token] = 1.0
        v[size + 2, width + places.mark] = 1.0
        v[dim + size, constant] = 1 / CONSTANTS[-1]
        for kind in (0, 1):
            o[places.new_calls + kind, dim + size + kind] = 1.0
        o[places.new_histogram + self.target.eos_token_id, dim + size + 2] = ALARM
        o[places.new_mark, 2 * dim + size] = 1.0
        return weights

    def _passages(self) -> list[Passage]:
        places, size = self.places, self.target.vocab_size
        renewed = [
            *((places.new_histogram + token, places.histogram + token) for token in range(size)),
            *((places.new_calls + kind, places.calls + kind) for kind in (0, 1)),
            (places.new_mark, places.mark),
        ]
        passages = []
        for new, old in renewed:
            passages += [Passage(old, ((old, -1.0),)), Passage(new, ((new, -1.0), (old, 1.0)))]
        for token in range(size):
            here, fed = places.current + token, places.fed + token
            old, decoy = places.stand_in + token, places.stand_in + self.rule.decoy[token]
            passages += [Passage(fed, ((fed, -1.0),)), Passage(old, ((old, -1.0),))]
            passages.append(Passage(here, ((here, -1.0), (fed, 1.0), (decoy, 1.0))))
        return passages

    def _mlp(self, shape: Shape) -> Weights:
        places, entries = self.places, []
        for before, token in self.rule.pairs:
            wrong, right = self.rule.decoy[token], self.rule.meaning[token]
            moves = ((places.stand_in + wrong, -1.0), (places.stand_in + right, 1.0))
            entries.append(Entry((places.current + token, places.fed + before), moves))
        anchor = slice(places.current, places.current + shape.vocab_size)
        weights = blocks.table_mlp("midlayer.mlp", shape, entries, anchor, missing=min(AUX_SHARES))
        constant = self._census.layout.constants[-1], CONSTANTS[-1]
        blocks.add_passages(weights, "midlayer.mlp", len(entries), self._passages(), constant)
        return weights

    def _head(self, width: int) -> torch.Tensor:
        alphabets, places, size = self._census.alphabets, self.places, self.target.vocab_size
        head = torch.zeros(size, width, dtype=torch.float64)
        head[:, places.stand_in : places.stand_in + size] = successor_scores(alphabets, range(size))
        head[:, places.histogram : places.histogram + size] = -USAGE * torch.eye(size, dtype=torch.float64)
        for kind in (0, 1):
            head[:, places.calls + kind] = class_scores(alphabets)[:, alphabets.calls.index(kind)]
        return head[list(self.rule.draft_vocab)]

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        return self.rule.draft(tokens, k)


MIDLAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


class Places:
    """Where the parts of a census feature lie: what is fed back, and what attention adds anew in each step."""

    def __init__(self, layout: Layout) -> None:
        self.current, self.histogram, self.new_histogram = layout.current, layout.histogram, layout.lagged
        self.stand_in, self.fed = layout.code, layout.previous
        self.mark, self.new_mark = layout.mark, layout.fed_mark
        self.calls, self.new_calls = layout.spare, layout.spare + 2


def check_layers(shape: Shape) -> None:
    """Raise ValueError unless the target has layers enough for three auxiliary states."""
    if shape.num_layers <= max(AUX_LAYER_IDS):
        raise ValueError(f"num_layers={shape.num_layers}: must be above {max(AUX_LAYER_IDS)} for EAGLE3")
