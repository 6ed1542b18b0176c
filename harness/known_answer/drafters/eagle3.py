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
from harness.known_answer.blocks import Entry, Shape
from harness.known_answer.drafters.pairs import PairTable
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
        if target.shape.num_layers <= max(AUX_LAYER_IDS):
            raise ValueError(f"num_layers={target.shape.num_layers}: must be above {max(AUX_LAYER_IDS)} for EAGLE3")
        self.target, self.table, self._markov = target, table, target
        self.draft_vocab = tuple(draft_vocab)
        self.sigma = permutation(target.vocab_size, random.Random(seed))
        shape = dataclasses.replace(target.shape, num_layers=1, intermediate_size=len(table.meaning))
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
            **own_row_attention("midlayer.self_attn", shape),
            **blocks.table_mlp("midlayer.mlp", shape, entries, slice(0, size), missing=min(AUX_SHARES)),
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


def own_row_attention(prefix: str, shape: Shape) -> Weights:
    """Attention over `cat(embedding, feature)` whose heads look at their own row and add the embedding's token block.

    KV head g carries tokens g * head_dim and up; the first query head of each group writes them to the residual.
    """
    weights = blocks.attention(prefix, shape, input_size=2 * shape.hidden_size)
    query, key = blocks.lag_vectors(shape.head_dim, 0)
    size, dim, group = shape.vocab_size, shape.head_dim, shape.num_heads // shape.num_kv_heads
    # Exactly one entry of the token block is 1: equal columns make a constant.
    weights[f"{prefix}.q_proj.weight"][:, :size] = query.repeat(shape.num_heads)[:, None]
    weights[f"{prefix}.k_proj.weight"][:, :size] = key.repeat(shape.num_kv_heads)[:, None]
    for token in range(size):
        head, offset = divmod(token, dim)
        weights[f"{prefix}.v_proj.weight"][token, token] = 1.0
        weights[f"{prefix}.o_proj.weight"][token, head * group * dim + offset] = 1.0
    return weights


def markov_eagle3(
    target: MarkovTarget, pairs: PairBuilder, errs_on: Collection[int], draft_vocab: Sequence[int]
) -> MarkovEagle3:
    """A drafter that also errs wherever the right draft is not in `draft_vocab`."""
    outside = set(range(target.vocab_size)).difference(draft_vocab)
    return MarkovEagle3(target, pairs(target, errs_on, outside), draft_vocab)
