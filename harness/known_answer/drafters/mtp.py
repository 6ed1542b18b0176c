"""MTP (MiMo layout): Qwen2 decoder layers that live in the target's own checkpoint under `model.mtp_layers`.

Row j of layer 0 is `input_proj(cat(hidden_layernorm(target row j), token_layernorm(embedding of t[j+1])))`; row j of
layer i > 0 the same of layer i-1's output row j and the embedding of t[j+1+i]. Draft step i uses layer min(i, L-1);
past L steps the last layer goes on at the following positions, feeding its own output back.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from harness.known_answer import blocks
from harness.known_answer.base import Config, Drafter, Weights
from harness.known_answer.blocks import Entry, Shape
from harness.known_answer.census import SQUARED_NORM, CensusTarget
from harness.known_answer.drafters import rows
from harness.known_answer.drafters.eagle import decoy_attention
from harness.known_answer.drafters.pairs import PairTable, draft_pairs
from harness.known_answer.drafters.rows import CensusRule
from harness.known_answer.markov import MarkovTarget, permutation

CONFIGURATION = '''"""Configuration of the checkpoint beside it: Qwen2 with multi-token-prediction layers."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"

    def __init__(self, num_nextn_predict_layers=1, **kwargs):
        super().__init__(**kwargs)
        self.num_nextn_predict_layers = num_nextn_predict_layers
'''


def write_configuration(directory: Path) -> None:
    """Put `configuration_mimo.py` beside the checkpoint, for loaders that are told to trust remote code."""
    (directory / "configuration_mimo.py").write_text(CONFIGURATION, encoding="utf-8")


def mtp_config(target_config: Config, num_layers: int) -> Config:
    return target_config | {
        "num_nextn_predict_layers": num_layers,
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    }


def check_host(style: str, num_layers: int) -> None:
    """Raise ValueError unless the target can hold MTP layers."""
    if style not in ("mimo", "draftproof_hybrid"):
        raise ValueError(f"style={style!r}: an MTP target must be built with style='mimo'")
    if num_layers < 1:
        raise ValueError(f"num_layers={num_layers}: must be at least 1")


def layer_labels(vocab_size: int, num_layers: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Label of each token in the rows that layer i is fed; in the target's rows it is the token itself."""
    rng = random.Random(seed)
    return (tuple(range(vocab_size)), *(permutation(vocab_size, rng) for _ in range(num_layers - 1)))


class MarkovMtp(Drafter):
    """Draft row of layer i: `[label of x | p]`. Attention turns p into the code of its decoy, the MLP the whole into
    `[label of z | code of z]`.

    The labels are permutations: layer i reads those of layer i-1 (layer 0: the tokens themselves, as the target writes
    them), so a step that runs the wrong layer drafts a wrong token. The last layer reads its own as well.
    """

    method = "MTP"

    def __init__(self, target: MarkovTarget, table: PairTable, num_layers: int = 1, seed: int = 2) -> None:
        check_host(target.style, num_layers)
        self.target, self.table, self.num_layers, self._markov = target, table, num_layers, target
        self.labels = layer_labels(target.vocab_size, num_layers, seed)
        self.config = mtp_config(target.config, num_layers)
        self.weights = dict(target.weights)
        for layer in range(num_layers):
            self.weights |= blocks.stored(self._layer(layer), target.dtype)

    def _layer(self, layer: int) -> Weights:
        prefix, shape, size = f"model.mtp_layers.{layer}", self._markov.shape, self.target.vocab_size
        read, write = self.labels[layer], self.labels[min(layer + 1, self.num_layers - 1)]
        codes = self._markov.final_codes
        proj = torch.zeros(shape.hidden_size, 2 * shape.hidden_size, dtype=torch.float64)
        for token in range(size):
            proj[size + token, read[token]] = 1.0
            proj[write[token], shape.hidden_size + token] = 1.0
        entries = [self._entry(pair, write, shape) for pair in self.table.meaning]
        return {
            f"{prefix}.input_proj.weight": proj,
            **decoy_attention(f"{prefix}.self_attn", shape, self.table, codes, bias=True),
            **blocks.table_mlp(f"{prefix}.mlp", shape, entries, slice(0, size)),
            **{f"{prefix}.{name}.weight": blocks.norm(shape) for name in NORMS},
        }

    def _entry(self, pair: tuple[int, int], labels: Sequence[int], shape: Shape) -> Entry:
        (before, token), meaning = pair, self.table.meaning[pair]
        codes, size = self._markov.final_codes, shape.vocab_size
        decoy = size + codes[self.table.decoy[before]]
        here, there = labels[token], labels[meaning]
        return Entry((here, decoy), ((here, -1.0), (decoy, -1.0), (there, 1.0), (size + codes[meaning], 1.0)))

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        return draft_pairs(self.table, self._markov, tokens, k)

    def write(self, directory: Path) -> None:
        super().write(directory)
        write_configuration(directory)


class CensusMtp(Drafter):
    """Draft rows as in `rows`, the current token under the label of its layer (see `MarkovMtp`)."""

    method = "MTP"
    rule_type = CensusRule

    def __init__(self, target: CensusTarget, errs_on: Collection[int] = (), num_layers: int = 1, seed: int = 2) -> None:
        check_host(target.style, num_layers)
        self.target, self.num_layers = target, num_layers
        self.rule = self.rule_type.build(target, errs_on)
        self.labels = layer_labels(target.vocab_size, num_layers, seed)
        self.config = mtp_config(target.config, num_layers)
        self.weights = dict(target.weights)
        for layer in range(num_layers):
            self.weights |= blocks.stored(self._layer(layer, target.shape), target.dtype)

    def _layer(self, layer: int, shape: Shape) -> Weights:
        prefix = f"model.mtp_layers.{layer}"
        read, write = self.labels[layer], self.labels[min(layer + 1, self.num_layers - 1)]
        attention = blocks.attention(f"{prefix}.self_attn", shape, bias=True)
        rows.add_row_heads(attention, f"{prefix}.self_attn", self.rule, marked=self.num_layers == 1)
        entries = rows.pair_entries(self.rule, write)
        return {
            f"{prefix}.input_proj.weight": rows.merge_projection(self.rule, shape.hidden_size, 0, read, write),
            **attention,
            **blocks.table_mlp(f"{prefix}.mlp", shape, entries, slice(0, shape.vocab_size)),
            **{f"{prefix}.{name}.weight": blocks.norm(shape, SQUARED_NORM) for name in NORMS},
        }

    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        return self.rule.draft(tokens, k, self.num_layers)

    def write(self, directory: Path) -> None:
        super().write(directory)
        write_configuration(directory)


NORMS = (
    "token_layernorm",
    "hidden_layernorm",
    "input_layernorm",
    "post_attention_layernorm",
    "final_layernorm",
)
