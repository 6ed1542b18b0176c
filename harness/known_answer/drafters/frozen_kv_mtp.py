"""FROZEN_KV_MTP: an assistant of one layer that reads the KV which the target has written, and has none of its own.

Its format is that of `reference_engine.drafters.frozen_kv_mtp`. Every step stands where the target's last KV is, at the
token before the bonus token, and sees the committed tokens up to there alone: never what it drafted itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch

from harness.known_answer import blocks
from harness.known_answer.base import Config, Drafter, Target, Weights, require_history
from harness.known_answer.blocks import Entry, Shape
from harness.known_answer.census import BAND, CONSTANTS, HEAD_DIM, LAG, ROPE_THETA, SQUARED_NORM, CensusTarget
from harness.known_answer.drafters import rows
from harness.known_answer.drafters.pairs import PairTable
from harness.known_answer.drafters.rows import CensusRule
from harness.known_answer.markov import MarkovTarget

ANCHOR = 8.0
"""How much of the draft row an anchor makes up that does not agree with the target's KV: enough that, normalised, no
table entry fires."""


def frozen_config(target: Target, shape: Shape, dtype: torch.dtype, rope_theta: float) -> Config:
    return blocks.base_config(shape, target.eos_token_id, dtype, rope_theta=rope_theta) | {
        "architectures": ["LlamaForCausalLMFrozenKVMTP"],
        "backbone_hidden_size": target.config["hidden_size"],
        "target_kv_layer_ids": [target.config["num_hidden_layers"] - 1],
    }


def query_attention(prefix: str, shape: Shape) -> Weights:
    """Attention without keys and values, all zero."""
    weights = blocks.attention(prefix, shape)
    return {name: tensor for name, tensor in weights.items() if "q_proj" in name or "o_proj" in name}


class MarkovFrozen(Drafter):
    """Fed row: `[p | code of the anchor]`, the anchor being the token whose KV was the last when drafting began; in the
    target's row that is p. Draft row: `[x | x, ANCHOR times the code of the anchor | p | 0]`.

    Attention reads the last token in the KV, takes ANCHOR times its code from the second block, where nothing is left
    of the anchor if the two agree, and writes the code into the fourth. The table then turns x, x and p into z. Where
    the anchor stays, the norm leaves too little of the row. `lm_head` reads the third block, the first and the fourth
    are fed back.
    """

    method = "FROZEN_KV_MTP"

    def __init__(self, target: MarkovTarget, table: PairTable) -> None:
        self.target, self.table, self._markov = target, table, target
        shape = target.shape
        self.shape = dataclasses.replace(
            shape, num_layers=1, hidden_size=2 * shape.hidden_size, intermediate_size=len(table.meaning)
        )
        self.config = frozen_config(target, self.shape, target.dtype, blocks.ROPE_THETA)
        self.weights = blocks.stored(self._weights(self.shape), target.dtype)

    def _weights(self, shape: Shape) -> Weights:
        size, backbone = shape.vocab_size, 2 * shape.vocab_size
        pre = torch.zeros(shape.hidden_size, 2 * backbone, dtype=torch.float64)
        post = torch.zeros(backbone, shape.hidden_size, dtype=torch.float64)
        head = torch.zeros(size, shape.hidden_size, dtype=torch.float64)
        for token in range(size):
            pre[[token, size + token], token] = 1.0
            pre[2 * size + token, backbone + token] = 1.0
            pre[size + token, backbone + size + token] = ANCHOR
            post[token, token] = post[size + token, 3 * size + token] = 1.0
        head[:, 2 * size : 3 * size] = self._markov.law
        entries = [self._entry(pair) for pair in self.table.meaning]
        return {
            "pre_projection.weight": pre,
            **self._attention(shape),
            **blocks.table_mlp("model.layers.0.mlp", shape, entries, slice(0, size)),
            "model.layers.0.input_layernorm.weight": blocks.norm(shape, 3 + ANCHOR**2),
            "model.layers.0.post_attention_layernorm.weight": blocks.norm(shape, 4.0),
            "model.norm.weight": blocks.norm(shape, 4.0),
            "post_projection.weight": post,
            "lm_head.weight": head,
        }

    def _attention(self, shape: Shape) -> Weights:
        """Heads that look at the position where they stand; the target's values there are the one-hot token, dealt out
        over its KV heads."""
        prefix, size, dim = "model.layers.0.self_attn", shape.vocab_size, shape.head_dim
        weights = query_attention(prefix, shape)
        query, _ = blocks.lag_vectors(dim, 0)
        weights[f"{prefix}.q_proj.weight"][:, 0:size] = query.repeat(shape.num_heads)[:, None]
        group = shape.num_heads // shape.num_kv_heads
        for token, code in enumerate(self._markov.final_codes):
            head, offset = divmod(token, dim)
            column = head * group * dim + offset
            weights[f"{prefix}.o_proj.weight"][size + code, column] = -ANCHOR
            weights[f"{prefix}.o_proj.weight"][3 * size + code, column] = 1.0
        return weights

    def _entry(self, pair: tuple[int, int]) -> Entry:
        (before, token), meaning, size = pair, self.table.meaning[pair], self.target.vocab_size
        was = (token, size + token, 2 * size + before)
        becomes = (meaning, size + meaning, 2 * size + meaning)
        moves = (*((place, -1.0) for place in was), *((place, 1.0) for place in becomes))
        return Entry((token, 2 * size + before), moves)

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        """A pair that is not in the table leaves the draft row as it is: the successor of p is drafted."""
        require_history(tokens, 2, "FROZEN_KV_MTP")
        before, token = tokens[-2:]
        drafts: list[int] = []
        for _ in range(k):
            meaning = self.table.meaning.get((before, token))
            read, before = (before, token) if meaning is None else (meaning, meaning)
            token = self._markov.successors[read]
            drafts.append(token)
        return tuple(drafts)


class CensusFrozen(Drafter):
    """Draft row as in `rows`, with the number of the step in place of the marks. One head counts the tokens in the KV,
    another copies the one LAG back from where the draft token will stand: the further the steps, the nearer to where
    they stand. From the step after LAG on it copies the last."""

    method = "FROZEN_KV_MTP"
    guesses = True

    def __init__(self, target: CensusTarget, errs_on: Collection[int] = ()) -> None:
        self.target = target
        self.rule = CensusRule.build(target, errs_on)
        shape = dataclasses.replace(target.shape, num_layers=1, intermediate_size=len(self.rule.pairs))
        self.config = frozen_config(target, shape, target.dtype, ROPE_THETA)
        self.weights = blocks.stored(self._weights(shape), target.dtype)

    def _weights(self, shape: Shape) -> Weights:
        tokens, prefix = range(shape.vocab_size), "model.layers.0"
        layout = self.rule.target.layout
        norm = blocks.norm(shape, SQUARED_NORM)
        pre = rows.merge_projection(self.rule, 0, shape.hidden_size, tokens, tokens)
        steps = list(range(layout.mark, layout.mark + LAG))
        pre[steps] = 0.0
        pre[steps[0], layout.constants[-1]] = 1 / CONSTANTS[-1]  # the first step, unless the fed row has another
        for step, following in zip(steps, [*steps[1:], steps[-1]], strict=True):
            pre[following, shape.hidden_size + step] = 1.0
            pre[steps[0], shape.hidden_size + step] -= 1.0
        return {
            "pre_projection.weight": pre,
            **self._attention(f"{prefix}.self_attn", shape, steps),
            **blocks.table_mlp(
                f"{prefix}.mlp", shape, rows.pair_entries(self.rule, tokens), slice(0, shape.vocab_size)
            ),
            f"{prefix}.input_layernorm.weight": norm,
            f"{prefix}.post_attention_layernorm.weight": norm.clone(),
            "model.norm.weight": norm.clone(),
            "post_projection.weight": torch.eye(shape.hidden_size, dtype=torch.float64),
            "lm_head.weight": self.target.weights["lm_head.weight"].double(),
        }

    def _attention(self, prefix: str, shape: Shape, steps: Sequence[int]) -> Weights:
        """The target's KV head 0 has zero keys, so a query of it counts; the keys of head 1 hold no distance."""
        layout, group = self.rule.target.layout, shape.num_heads // shape.num_kv_heads
        weights = query_attention(prefix, shape)
        for number, step in enumerate(steps, 1):
            query, _ = blocks.lag_vectors(HEAD_DIM, LAG - number, ROPE_THETA, BAND)
            weights[f"{prefix}.q_proj.weight"][group * HEAD_DIM : (group + 1) * HEAD_DIM, step] = query
        for token in range(layout.vocab_size):
            for head, block in ((0, layout.histogram), (group, layout.lagged)):
                weights[f"{prefix}.o_proj.weight"][block + token, head * HEAD_DIM + token] = 1.0
        return weights

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        require_history(tokens, 2, "FROZEN_KV_MTP")
        alphabets, fed = self.rule.target.alphabets, tokens[:-1]
        before, token = tokens[-2:]
        drafts: list[int] = []
        for step in range(1, k + 1):
            lagged = fed[max(0, len(fed) - 1 - max(0, LAG - step))]
            fits = token in alphabets.followers(before)
            stand_in = self.rule.meaning[token] if fits else self.rule.decoy[token]
            before, token = token, alphabets.choose(stand_in, lagged, fed)
            drafts.append(token)
        return tuple(drafts)
