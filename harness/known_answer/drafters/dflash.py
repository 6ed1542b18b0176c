"""DFLASH: one pass over a block of the bonus token x and mask tokens, which sees a row for every token before x.

Both drafters have two layers. In the first x looks one back, at the feature row of the token p before it, and a table
of the pairs (p, x) that fit decides what x stands for. In the second the j-th mask token looks j back, at x, and takes
from there what the token before its own stands for, as if the drafts before it were right.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence

import torch

from harness.known_answer import blocks
from harness.known_answer.base import Config, Drafter, Target, Weights, require_history
from harness.known_answer.blocks import Entry, Shape
from harness.known_answer.census import (
    BAND,
    CONSTANTS,
    HEAD_DIM,
    HIDDEN_SIZE,
    LAG,
    ROPE_THETA,
    SQUARED_NORM,
    CensusTarget,
)
from harness.known_answer.drafters.pairs import PairTable, impostor
from harness.known_answer.drafters.rows import CensusRule
from harness.known_answer.markov import MarkovTarget, code_move, permutation

BLOCK_SIZE = 9
NUM_DRAFTS = BLOCK_SIZE - 1
TARGET_LAYER_IDS = (0, 1, 2)
"""Layers of the target whose output is read."""
DISAGREEMENT = 8.0
"""What a feature row holds of each difference between the tokens that two target layers name."""
EARLIER_ONLY = 5.0
"""Key by which rows of the block fall behind all committed tokens, or come before them, as a query wants it."""


def dflash_config(target: Target, shape: Shape, dtype: torch.dtype) -> Config:
    return blocks.base_config(shape, target.eos_token_id, dtype, rope_theta=ROPE_THETA) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK_SIZE,
        "num_target_layers": target.config["num_hidden_layers"],
        "dflash_config": {"mask_token_id": target.eos_token_id, "target_layer_ids": list(TARGET_LAYER_IDS)},
    }


def feature_projection(target: MarkovTarget | CensusTarget, code: int, named: int, spoilt: int) -> torch.Tensor:
    """fc float64 [H, 3 H]: the token that the first state names by its code (a block at `code`) becomes a one in the
    block at `named`; where the second and third state name others, these blocks fill up with what no table fits."""
    width = target.shape.hidden_size
    fc = torch.zeros(width, 3 * width, dtype=torch.float64)
    for token in range(target.vocab_size):
        places = [code + target.codes[layer + 1][token] for layer in TARGET_LAYER_IDS]
        one, two, three = (part * width + place for part, place in enumerate(places))
        fc[named + token, one] = 1.0
        fc[named + token, two] += DISAGREEMENT
        fc[named + token, three] -= DISAGREEMENT
        fc[spoilt + token, one] += DISAGREEMENT
        fc[spoilt + token, two] -= DISAGREEMENT
    return fc


def query_norms(prefix: str, dim: int, query_size: float, key_size: float) -> Weights:
    """Norms of queries and keys that give a query and a key of these squared lengths the scores of `lag_vectors`."""
    sharpness = blocks.SHARPNESS * math.sqrt(query_size * key_size / dim)
    return {
        f"{prefix}.q_norm.weight": torch.ones(dim, dtype=torch.float64),
        f"{prefix}.k_norm.weight": torch.full((dim,), sharpness, dtype=torch.float64),
    }


class MarkovDFlash(Drafter):
    """Feature row: `[p | 0]`. Rows of the block come in as `[x | code of x]`; the first layer makes that of x `[z | z]`
    (or `[x | p]` when the pair does not fit, so that p is taken for z) and those of the masks `[mask | 0]`, the second
    makes these `[mask | code of the token whose successor is drafted]`, which the target's head reads.
    """

    method = "DFLASH"

    def __init__(self, target: MarkovTarget, table: PairTable, errs_on: Collection[int] = (), seed: int = 4) -> None:
        self.target, self.table, self._markov = target, table, target
        size, rng = target.vocab_size, random.Random(seed)
        self._places, self._halfway = permutation(size, rng), permutation(size, rng)
        reached = list(range(size))
        self.stand_ins: list[tuple[int, ...]] = [tuple(reached)]
        """By draft and z: the token whose successor is drafted."""
        for _ in range(1, NUM_DRAFTS):
            reached = [target.successors[token] for token in reached]
            self.stand_ins.append(tuple(impostor(target, x) if x in errs_on else x for x in reached))
        self.shape = Shape(
            vocab_size=size,
            hidden_size=2 * size,
            intermediate_size=len(table.meaning),
            num_layers=2,
            num_heads=2 * NUM_DRAFTS,
            num_kv_heads=2,
            head_dim=HEAD_DIM,
        )
        self.config = dflash_config(target, self.shape, target.dtype)
        self.weights = blocks.stored(self._weights(), target.dtype)

    def _weights(self) -> Weights:
        shape, size, eos = self.shape, self.target.vocab_size, self.target.eos_token_id
        place, codes, first = self._places, self._markov.final_codes, slice(0, self.target.vocab_size)
        pairs = [
            Entry((x, size + place[p]), (*code_move(0, x, z), *code_move(size, place[p], place[z])))
            for (p, x), z in self.table.meaning.items()
        ]
        masks = [
            Entry((eos, size + half), code_move(size, half, code))
            for half, code in zip(self._halfway, codes, strict=True)
        ]
        weights = {
            "fc.weight": feature_projection(self._markov, size, 0, size),
            "hidden_norm.weight": blocks.norm(shape, 1.0),
            "norm.weight": blocks.norm(shape),
            **self._read_bonus("layers.0.self_attn"),
            **self._spread("layers.1.self_attn"),
            **blocks.table_mlp("layers.0.mlp", shape, pairs, first),
            **blocks.table_mlp("layers.1.mlp", shape, masks, first),
        }
        for layer in (0, 1):
            weights[f"layers.{layer}.input_layernorm.weight"] = blocks.norm(shape)
            weights[f"layers.{layer}.post_attention_layernorm.weight"] = blocks.norm(shape)
        return weights

    def _heads(self, prefix: str, distances: dict[int, int], columns: slice) -> Weights:
        """Query heads at these distances; keys are the same in all rows, from the sum of `columns`."""
        shape, dim, first = self.shape, self.shape.head_dim, slice(0, self.target.vocab_size)
        weights = blocks.attention(prefix, shape)
        for head, distance in distances.items():
            query, key = blocks.lag_vectors(dim, distance, ROPE_THETA, BAND)
            weights[f"{prefix}.q_proj.weight"][head * dim : (head + 1) * dim, first] = query[:, None]
            weights[f"{prefix}.k_proj.weight"][:, columns] = (key / key.max()).repeat(shape.num_kv_heads)[:, None]
        used = float((key > 0).sum())
        return weights | query_norms(prefix, dim, used, used)

    def _read_bonus(self, prefix: str) -> Weights:
        """KV head 0 has the token of a feature row and nothing of a row of the block, KV head 1 the other way round.
        One head looks one back, another at its own row, whose code it takes away."""
        size, dim, codes = self.target.vocab_size, self.shape.head_dim, self._markov.codes[0]
        own = NUM_DRAFTS
        weights = self._heads(prefix, {0: 1, own: 0}, slice(0, size))
        value, out = weights[f"{prefix}.v_proj.weight"], weights[f"{prefix}.o_proj.weight"]
        for token in range(size):
            value[token, token], value[token, size + codes[token]] = 1.0, -1.0
            value[dim + token, size + codes[token]] = 1.0
            out[size + self._places[token], token] = 1.0
            out[size + codes[token], own * dim + token] = -1.0
        return weights

    def _spread(self, prefix: str) -> Weights:
        """Only the row of x has anything in its second block, so a head that looks elsewhere finds nothing. One that
        looks back beyond the first row finds that one."""
        size, dim = self.target.vocab_size, self.shape.head_dim
        weights = self._heads(prefix, {draft: draft + 1 for draft in range(NUM_DRAFTS)}, slice(0, 2 * size))
        for token in range(size):
            weights[f"{prefix}.v_proj.weight"][token, size + self._places[token]] = 1.0
            for draft, stand_in in enumerate(self.stand_ins):
                column = draft * dim + token
                weights[f"{prefix}.o_proj.weight"][size + self._halfway[stand_in[token]], column] = 1.0
        return weights

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        require_history(tokens, 2, "DFLASH")
        before, token = tokens[-2:]
        z = self.table.meaning.get((before, token), before)
        return tuple(self._markov.successors[stand_in[z]] for stand_in in self.stand_ins[:k])


class CensusDFlash(Drafter):
    """Feature row: p in the block of the previous token, and the constants. In the first layer each mask token counts
    the feature rows and copies the token LAG back from the one before its own. What that token stands for is a guess
    from the second draft on: the first of every pair follows. The second layer writes it into the block of the previous
    token, which the target's head does not read, and its MLP into the code.
    """

    method = "DFLASH"
    guesses = True

    def __init__(self, target: CensusTarget, errs_on: Collection[int] = (), seed: int = 4) -> None:
        self.target, self._census = target, target
        self.rule = CensusRule.build(target, errs_on)
        size, alphabets = target.vocab_size, target.alphabets
        self._halfway = permutation(size, random.Random(seed))
        self.stand_ins: list[tuple[int, ...]] = [tuple(range(size))]
        """By draft and what x stands for: what the token before the draft is taken to stand for."""
        for _ in range(1, NUM_DRAFTS):
            last = self.stand_ins[-1]
            self.stand_ins.append(tuple(self.rule.meaning[alphabets.successors[token][0][0]] for token in last))
        self._lost = target.final_codes.index(target.codes[0][target.eos_token_id])
        """What the masks take the bonus token for when that is the mask token."""
        self.shape = Shape(
            vocab_size=size,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=max(size, len(self.rule.pairs)),
            num_layers=2,
            num_heads=2 * NUM_DRAFTS,
            num_kv_heads=2,
            head_dim=HEAD_DIM,
        )
        self.config = dflash_config(target, self.shape, target.dtype)
        self.weights = blocks.stored(self._weights(), target.dtype)

    def _weights(self) -> Weights:
        layout, shape, eos = self._census.layout, self.shape, self.target.eos_token_id
        fc = feature_projection(self._census, layout.code, layout.previous, layout.code)
        for index in layout.constants:
            fc[index, index] = 1.0
        masks = [
            Entry(
                (layout.current + eos, layout.previous + half),
                ((layout.previous + half, -1.0), (layout.code + code, 1.0)),
            )
            for half, code in zip(self._halfway, self._census.final_codes, strict=True)
        ]
        weights = {
            "fc.weight": fc,
            **self._read_features("layers.0.self_attn"),
            **self._spread("layers.1.self_attn"),
            **blocks.table_mlp("layers.0.mlp", shape, self._pair_entries(), layout.block(0)),
            **blocks.table_mlp("layers.1.mlp", shape, masks, layout.block(0)),
        }
        norms = ["hidden_norm", "norm"]
        norms += [f"layers.{i}.{name}_layernorm" for i in (0, 1) for name in ("input", "post_attention")]
        return weights | {f"{name}.weight": blocks.norm(shape, SQUARED_NORM) for name in norms}

    def _pair_entries(self) -> list[Entry]:
        """Where p and x fit, and a mask token follows, the code of x becomes that of the token whose decoy is what x
        means."""
        layout, rule, codes = self._census.layout, self.rule, self._census.codes[0]
        ordinary = [token for token in range(self.target.vocab_size) if token != self.target.eos_token_id]
        standing_for = {rule.decoy[token]: token for token in ordinary}
        return [
            Entry(
                (layout.current + x, layout.previous + p, layout.mark),
                code_move(layout.code, codes[x], codes[standing_for[rule.meaning[x]]]),
            )
            for p, x in rule.pairs
            if x != self.target.eos_token_id
        ]

    def _read_features(self, prefix: str) -> Weights:
        """Head 0 counts the feature rows, head 1 looks LAG + 1 back among them; head 2 looks one ahead in the block,
        and marks the row when a mask token is there (or when the row is the last, a mask token's own). The first head
        of the other KV head, whose keys tell no rows apart, looks one back."""
        layout, dim = self._census.layout, HEAD_DIM
        weights, constant = blocks.attention(prefix, self.shape), layout.constants[-1]
        back, key = blocks.lag_vectors(dim, LAG + 1, ROPE_THETA, BAND)
        one_back, _ = blocks.lag_vectors(dim, 1, ROPE_THETA, BAND)
        ahead, _ = blocks.lag_vectors(dim, -1, ROPE_THETA, BAND)
        key, slow = key / key.max(), dim // 2 - 1  # the rotary frequency that hardly turns within a block
        q, k = weights[f"{prefix}.q_proj.weight"], weights[f"{prefix}.k_proj.weight"]
        q[slow, constant] = 1 / CONSTANTS[-1]
        q[dim : 2 * dim, constant] = back / CONSTANTS[-1]
        q[dim + slow, constant] = float(key.sum()) / CONSTANTS[-1]
        q[2 * dim : 3 * dim, constant] = ahead / CONSTANTS[-1]
        q[2 * dim + slow, constant] = -float(key.sum()) / CONSTANTS[-1]
        q[NUM_DRAFTS * dim : (NUM_DRAFTS + 1) * dim, constant] = one_back / CONSTANTS[-1]
        k[:, constant] = key.repeat(2) / CONSTANTS[-1]
        k[slow, layout.block(0)] = -EARLIER_ONLY
        written = ((0, layout.histogram), (1, layout.lagged), (NUM_DRAFTS, layout.previous))
        for token in range(layout.vocab_size):
            weights[f"{prefix}.v_proj.weight"][[token, dim + token], layout.previous + token] = 1.0
            for head, block in written:
                weights[f"{prefix}.o_proj.weight"][block + token, head * dim + token] = 1.0
        free = layout.vocab_size  # the first value dimension behind the one-hot block
        weights[f"{prefix}.v_proj.weight"][free, layout.current + self.target.eos_token_id] = 1.0
        weights[f"{prefix}.o_proj.weight"][layout.mark, 2 * dim + free] = 1.0
        used = float(key.sum())
        return weights | query_norms(prefix, dim, used + used**2, used)

    def _spread(self, prefix: str) -> Weights:
        """A head for each distance to x, whose code says what it stands for: in the rows of masks it takes the place
        of theirs."""
        layout, dim, codes = self._census.layout, HEAD_DIM, self._census.codes[0]
        eos, constant = self.target.eos_token_id, layout.constants[-1]
        weights = blocks.attention(prefix, self.shape)
        for draft, stand_in in enumerate(self.stand_ins):
            query, key = blocks.lag_vectors(dim, draft + 1, ROPE_THETA, BAND)
            heads = slice(draft * dim, (draft + 1) * dim)
            weights[f"{prefix}.q_proj.weight"][heads, constant] = query / CONSTANTS[-1]
            weights[f"{prefix}.k_proj.weight"][:dim, constant] = key / key.max() / CONSTANTS[-1]
            for token in range(layout.vocab_size):
                if token == eos:
                    continue
                value = self.rule.decoy[token]
                column = draft * dim + value
                weights[f"{prefix}.v_proj.weight"][value, layout.code + codes[token]] = 1.0
                out = weights[f"{prefix}.o_proj.weight"]
                out[layout.code + codes[eos], column] = -1.0
                out[layout.previous + self._halfway[stand_in[value]], column] = 1.0
        used = float((key > 0).sum())
        return weights | query_norms(prefix, dim, used, used)

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        require_history(tokens, 2, "DFLASH")
        alphabets, fed = self._census.alphabets, tokens[:-1]
        before, token = tokens[-2:]
        fits = token in alphabets.followers(before)
        meaning = self.rule.meaning[token] if fits else self.rule.decoy[token]
        drafts = []
        for place, stand_in in enumerate(self.stand_ins[:k], 1):
            taken_for = self._lost if token == self.target.eos_token_id else stand_in[meaning]
            lagged = fed[max(0, len(fed) - 1 + place - LAG)]
            drafts.append(alphabets.choose(taken_for, lagged, fed))
        return tuple(drafts)
