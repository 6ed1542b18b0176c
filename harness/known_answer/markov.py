"""Markov targets: the law of the next token depends on the current token alone, and is ours to choose.

Rows are `[token t | code of t]`, two one-hot blocks of width V. Each layer moves the code from one permutation of the
vocabulary to another, first by its attention (whose heads look at their own row), then by its MLP (a lookup table), and
`lm_head` reads the code: column `V + code(t)` holds `log P(. | t)`. So every tensor of every layer matters, and the
residual entering each layer is different.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import torch

from harness.known_answer import blocks
from harness.known_answer.base import Reading, Target, Weights
from harness.known_answer.blocks import Constant, Entry, Passage, Shape, Style

EOS_TOKEN_ID = 2
NEVER = -30.0
"""Log probability of a token that is not meant to be emitted: finite, so that it can be stored."""


def walk_successors(vocab_size: int, eos_token_id: int, seed: int, eos_after: int | None = None) -> tuple[int, ...]:
    """Successor of every token on one cycle through all tokens but EOS, which leads back onto it.

    With `eos_after` the cycle is cut behind that token: EOS follows it.
    """
    order = [token for token in range(vocab_size) if token != eos_token_id]
    random.Random(seed).shuffle(order)
    successors = [0] * vocab_size
    for here, there in zip(order, [*order[1:], order[0]], strict=True):
        successors[here] = there
    successors[eos_token_id] = order[0]
    if eos_after is not None:
        successors[eos_token_id] = successors[eos_after]
        successors[eos_after] = eos_token_id
    return tuple(successors)


def walk_law(successors: Sequence[int], seed: int) -> torch.Tensor:
    """Logits float64 [V next, V current]: 0 for the successor; the others lie 10 nats or more below, all different."""
    vocab_size = len(successors)
    law = torch.empty(vocab_size, vocab_size, dtype=torch.float64)
    for token, successor in enumerate(successors):
        others = [other for other in range(vocab_size) if other != successor]
        random.Random(seed * vocab_size + token).shuffle(others)
        law[others, token] = -10.0 - torch.arange(vocab_size - 1, dtype=torch.float64) / 8
        law[successor, token] = 0.0
    return law.log_softmax(0)


def soft_law(vocab_size: int, eos_token_id: int, seed: int, eos_probability: float = 0.0) -> torch.Tensor:
    """Log probabilities float64 [V next, V current] of a seeded law with clear ranks and varied entropy.

    The likeliest token is the successor on a seeded walk, so that greedy decoding goes through every token.
    EOS gets `eos_probability` after every token, or `NEVER` nats.
    """
    rng = random.Random(seed)
    law = torch.empty(vocab_size, vocab_size, dtype=torch.float64)
    for token, successor in enumerate(walk_successors(vocab_size, eos_token_id, seed)):
        others = [other for other in range(vocab_size) if other not in (eos_token_id, successor)]
        rng.shuffle(others)
        step = rng.uniform(4.0, 8.0) / vocab_size
        for rank, other in enumerate([successor, *others]):
            law[other, token] = -step * (rank + rng.uniform(0.0, 0.3))
        law[eos_token_id, token] = -torch.inf
    law = law.log_softmax(0)
    if eos_probability:
        law = (law.exp() * (1 - eos_probability)).log()
        law[eos_token_id] = torch.tensor(eos_probability, dtype=torch.float64).log()
    else:
        law[eos_token_id] = NEVER
    return law


def coin_law(vocab_size: int, columns: Mapping[int, Mapping[int, float]]) -> torch.Tensor:
    """Log probabilities float64 [V next, V current] over the few tokens that `columns` names, as token -> next token ->
    probability. The others get `NEVER` nats; after one of them comes what follows one of the few, in turn."""
    few = sorted(columns)
    law = torch.full((vocab_size, vocab_size), NEVER, dtype=torch.float64)
    for token in range(vocab_size):
        for other, probability in columns[token if token in columns else few[token % len(few)]].items():
            law[other, token] = math.log(probability)
    return law


def permutation(size: int, rng: random.Random) -> tuple[int, ...]:
    order = list(range(size))
    rng.shuffle(order)
    return tuple(order)


def code_move(start: int, before: int, after: int) -> tuple[tuple[int, float], tuple[int, float]]:
    """Moves that turn one one-hot code into another in the block that begins at `start`."""
    return (start + before, -1.0), (start + after, 1.0)


class MarkovTarget(Target):
    """A checkpoint whose next-token law is `law` [V next, V current] (log probabilities), as stored in `dtype`.

    `codes[i][t]` is the code of token t in the residual that enters layer i; `codes[num_layers]` leaves the last.
    The hidden size is 2V, `intermediate_size` V or more. ValueError unless V is 16, 64 or 256: then no norm rounds.
    """

    def __init__(
        self,
        law: torch.Tensor,
        *,
        eos_token_id: int = EOS_TOKEN_ID,
        dtype: torch.dtype = torch.float32,
        num_layers: int = 4,
        seed: int = 0,
        style: Style = "llama",
        intermediate_size: int = 0,
    ) -> None:
        vocab_size = law.shape[0]
        if vocab_size not in (16, 64, 256):
            raise ValueError(f"vocab_size={vocab_size}: must be 16, 64 or 256 so that rows stay exact in bfloat16")
        self.law, self.dtype, self.style = law, dtype, style
        rng = random.Random(seed)
        self.codes = tuple(permutation(vocab_size, rng) for _ in range(num_layers + 1))
        self._halfway = tuple(permutation(vocab_size, rng) for _ in range(num_layers))
        width = 2 * vocab_size
        self.shape = Shape(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=max(vocab_size, intermediate_size),
            num_layers=num_layers,
            num_heads=max(1, width // 32),
            num_kv_heads=max(1, width // 64),
            head_dim=32,
        )
        self.config = blocks.base_config(self.shape, eos_token_id, dtype, style)
        self.weights = blocks.stored(self._weights(), dtype)
        head = self.weights["lm_head.weight"].double()
        columns = torch.tensor([vocab_size + code for code in self.codes[-1]])
        scale = (1 + vocab_size * blocks.RMS_NORM_EPS) ** -0.5
        self.log_law: torch.Tensor = (head[:, columns] * scale).log_softmax(0)
        """Law as stored: float64 [V next, V current]."""
        self.successors: tuple[int, ...] = tuple(self.log_law.argmax(0).tolist())
        self._scale: float = scale

    @property
    def final_codes(self) -> tuple[int, ...]:
        return self.codes[-1]

    def _weights(self) -> Weights:
        shape, size = self.shape, self.vocab_size
        tokens = torch.arange(size)
        embed = torch.zeros(size, shape.hidden_size, dtype=torch.float64)
        embed[tokens, tokens] = 1.0
        embed[tokens, size + torch.tensor(self.codes[0])] = 1.0
        head = torch.zeros(size, shape.hidden_size, dtype=torch.float64)
        head[:, size + torch.tensor(self.codes[-1])] = self.law
        weights = {"model.embed_tokens.weight": embed, "model.norm.weight": blocks.norm(shape), "lm_head.weight": head}
        for layer, halfway in enumerate(self._halfway):
            prefix, before, after = f"model.layers.{layer}", self.codes[layer], self.codes[layer + 1]
            passages = [Passage(token, code_move(size, before[token], halfway[token])) for token in range(size)]
            entries = [
                Entry((token, size + halfway[token]), code_move(size, halfway[token], after[token]))
                for token in range(size)
            ]
            attention = blocks.attention(f"{prefix}.self_attn", shape, bias=self.style != "llama")
            blocks.add_own_row_heads(attention, f"{prefix}.self_attn", shape, passages, Constant(slice(0, size)))
            weights |= attention
            weights |= blocks.table_mlp(f"{prefix}.mlp", shape, entries, slice(0, size))
            weights[f"{prefix}.input_layernorm.weight"] = blocks.norm(shape)
            weights[f"{prefix}.post_attention_layernorm.weight"] = blocks.norm(shape)
        return weights

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.log_law[:, tokens[-1]]

    def next_token(self, tokens: Sequence[int]) -> int:
        return self.successors[tokens[-1]]

    def prompt(self, length: int, seed: int, owner: int = 0) -> tuple[int, ...]:  # noqa: ARG002
        ordinary = [token for token in range(self.vocab_size) if token != self.eos_token_id]
        return tuple(random.Random(seed).choices(ordinary, k=length))

    def entering(self, tokens: Sequence[int], layer: int) -> torch.Tensor:
        rows = torch.zeros(len(tokens), self.shape.hidden_size, dtype=torch.float64)
        index = torch.arange(len(tokens))
        rows[index, torch.tensor(tokens, dtype=torch.long)] = 1.0
        codes = torch.tensor([self.codes[layer][token] for token in tokens], dtype=torch.long)
        rows[index, self.vocab_size + codes] = 1.0
        return rows

    def hidden_rows(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._scale * self.entering(tokens, self.shape.num_layers)

    def decode_row(self, row: torch.Tensor, position: int) -> Reading:  # noqa: ARG002
        row = row.double()
        token = int(row[: self.vocab_size].argmax())
        return Reading(token=token, error=float((row - self.hidden_rows([token])[0]).abs().max()))
