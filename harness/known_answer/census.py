"""Census targets: every hidden row tells its token, the histogram of the KV it saw, the token a fixed distance back and
whose request it belongs to; the next token depends on all of these.

A row is `[current token | histogram | lagged token | code | previous token | marks | constants]`, blocks of width V.
One head attends uniformly and yields the histogram; another peaks `LAG` positions back and copies that token (the first
one where there are fewer). Tokens form alphabets, one per owner, and are of two kinds. Each token has two successors of
each kind: the lagged token calls for a kind, and of that pair the one used less so far follows (the first on a tie).

The constants dominate the norm of a row, so that it hardly depends on the histogram.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from harness.known_answer import blocks
from harness.known_answer.base import Reading, Target, Weights
from harness.known_answer.blocks import Constant, Entry, Passage, Shape, Style
from harness.known_answer.markov import EOS_TOKEN_ID, code_move, permutation

HIDDEN_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 256, 64, 4, 2
LAG = 8
ROPE_THETA = 100.0
BAND = (0.27, 0.49)
"""Rotary frequencies of the lag heads. With five of them the score falls all the way from distance LAG to 0 (so that
short prompts give the first token) and comes nowhere within 7% of its peak again up to distance 2047."""
CONSTANTS = (63.0, 11.0, 2.0)
"""With two ones the squared norm of a row is 4096, sixteen per element: nothing is rounded in bfloat16."""
SQUARED_NORM = 4096.0
BARRED = 16.0
"""How far (nats) a token falls that is not a successor, or not of the kind that is called for."""
USAGE = 16.0
"""How far (nats) a token falls per share of the history that it makes up."""
TIE = 1 / 600
"""Share by which the second of a pair is held back: half a count at 300 tokens. There a tie and a lead of one are told
apart best; towards 600 tokens the gap of a lead of one closes."""
ALARM = -8.0
"""Histogram entry that makes EOS the likeliest token by far."""
SHARES_ROUNDING = 2.0**-7
"""How far the shares of a bfloat16 histogram may sum from 1 by rounding alone."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a row lie; V is the width of a block."""

    vocab_size: int

    def block(self, number: int) -> slice:
        return slice(number * self.vocab_size, (number + 1) * self.vocab_size)

    @property
    def current(self) -> int:
        return 0

    @property
    def histogram(self) -> int:
        return self.vocab_size

    @property
    def lagged(self) -> int:
        return 2 * self.vocab_size

    @property
    def code(self) -> int:
        return 3 * self.vocab_size

    @property
    def previous(self) -> int:
        return 4 * self.vocab_size

    @property
    def mark(self) -> int:
        """1 in the output rows of a drafter, 0 in those of the target."""
        return 5 * self.vocab_size

    @property
    def fed_mark(self) -> int:
        """The mark of the row that a drafter was fed."""
        return self.mark + 1

    @property
    def spare(self) -> int:
        """First of four unused indices."""
        return self.mark + 2

    @property
    def constants(self) -> range:
        return range(HIDDEN_SIZE - len(CONSTANTS), HIDDEN_SIZE)


@dataclass(frozen=True, slots=True)
class Alphabets:
    """`members[owner]` are the tokens of an owner, `owner[token]` its owner (None for EOS).

    `successors[token][kind]` is the pair of tokens of that kind that may follow. Which kind follows is told by
    `calls[lagged token]`. The two of a pair call for different kinds, so the sequence of kinds never settles. No token
    is its own successor, or with `stutter` each is, for its own kind.
    """

    members: tuple[tuple[int, ...], ...]
    owner: tuple[int | None, ...]
    kind: tuple[int, ...]
    calls: tuple[int, ...]
    successors: tuple[tuple[tuple[int, int], tuple[int, int]], ...]

    @classmethod
    def build(cls, owners: int, size: int, eos_token_id: int, seed: int, *, stutter: bool = False) -> Alphabets:
        """Deal the tokens out in turn, then lay a seeded regular graph over each alphabet: every token has as many
        predecessors as successors. `size` must be a multiple of 4 and 8 or more, else ValueError."""
        if size < 8 or size % 4:
            raise ValueError(f"alphabet_size={size}: must be a multiple of 4 and at least 8")
        tokens = [token for token in range(owners * size + 1) if token != eos_token_id]
        members = tuple(tuple(tokens[owner::owners]) for owner in range(owners))
        total = len(tokens) + 1
        owner_of: list[int | None] = [None] * total
        kind, calls, successors = [0] * total, [0] * total, [((0, 0), (0, 0))] * total
        rng = random.Random(seed)
        for owner, alphabet in enumerate(members):
            order = rng.sample(alphabet, size)
            for place, token in enumerate(order):
                owner_of[token], kind[token], calls[token] = owner, place % 2, place // 2 % 2
            for token, pairs in _regular_graph(order, rng, stutter).items():
                successors[token] = pairs
        successors[eos_token_id] = successors[members[0][0]]
        return cls(members, tuple(owner_of), tuple(kind), tuple(calls), tuple(successors))

    def choose(self, stand_in: int, lagged: int, fed: Sequence[int]) -> int:
        """What follows a token that counts as `stand_in`, given the lagged token and the history `fed`."""
        first, second = self.successors[stand_in][self.calls[lagged]]
        return second if fed.count(first) - fed.count(second) > TIE * len(fed) else first

    def followers(self, token: int) -> frozenset[int]:
        return frozenset(self.successors[token][0] + self.successors[token][1])


def _regular_graph(
    order: Sequence[int], rng: random.Random, stutter: bool
) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
    """Successor pairs of each token of one alphabet. `order[4 j + 2 call + kind]` is token j of its kind and call."""
    turns = len(order) // 4
    # A step of 0 within its group lets a token follow itself.
    steps = {(here, there): rng.randrange(1, turns) for here in range(4) for there in range(4)}
    if stutter:
        steps |= {(here, here): 0 for here in range(4)}
    graph = {}
    for place, token in enumerate(order):
        turn, here = divmod(place, 4)
        pairs = []
        for kind in (0, 1):
            pair = [order[4 * ((turn + steps[here, 2 * call + kind]) % turns) + 2 * call + kind] for call in (0, 1)]
            rng.shuffle(pair)
            pairs.append((pair[0], pair[1]))
        graph[token] = (pairs[0], pairs[1])
    return graph


class CensusTarget(Target):
    """A census checkpoint. `meaning[t]` names the token whose successors follow t (t itself unless told otherwise).

    The vocabulary has `owners * alphabet_size + 1` tokens, at most 50 (ValueError otherwise). Every layer moves the
    code block, as in a Markov target, but in the last one attention does something else: it holds both heads.
    """

    def __init__(
        self,
        *,
        owners: int = 4,
        alphabet_size: int = 12,
        eos_token_id: int = EOS_TOKEN_ID,
        dtype: torch.dtype = torch.float32,
        num_layers: int = 4,
        seed: int = 0,
        style: Style = "llama",
        meaning: Sequence[int] | None = None,
        intermediate_size: int = 0,
        stutter: bool = False,
    ) -> None:
        vocab_size = owners * alphabet_size + 1
        if vocab_size > 50:
            raise ValueError(f"owners={owners}, alphabet_size={alphabet_size}: at most 49 tokens besides EOS fit")
        self.alphabets = Alphabets.build(owners, alphabet_size, eos_token_id, seed, stutter=stutter)
        self.layout, self.dtype, self.style, self.seed = self.new_layout(vocab_size), dtype, style, seed
        self.stutter = stutter
        self.meaning = tuple(meaning) if meaning is not None else tuple(range(vocab_size))
        rng = random.Random(seed + 1)
        self.codes = tuple(permutation(vocab_size, rng) for _ in range(num_layers + 1))
        self._halfway = (*(permutation(vocab_size, rng) for _ in range(num_layers - 1)), self.codes[-2])
        self.shape = Shape(
            vocab_size=vocab_size,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=max(vocab_size, intermediate_size),
            num_layers=num_layers,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
        )
        self.config = blocks.base_config(self.shape, eos_token_id, dtype, style, ROPE_THETA)
        self.weights = blocks.stored(self._weights(), dtype)
        self.head = self.weights["lm_head.weight"].double()
        self._norm = self.weights["model.norm.weight"][0].double()

    @staticmethod
    def new_layout(vocab_size: int) -> Layout:
        return Layout(vocab_size)

    @property
    def final_codes(self) -> tuple[int, ...]:
        return self.codes[-1]

    def variant(self, meaning: Sequence[int]) -> CensusTarget:
        """A one-layer model that takes token t for `meaning[t]` when it looks for successors."""
        owners, size = len(self.alphabets.members), len(self.alphabets.members[0])
        return CensusTarget(
            owners=owners,
            alphabet_size=size,
            eos_token_id=self.eos_token_id,
            dtype=self.dtype,
            num_layers=1,
            seed=self.seed,
            meaning=meaning,
            stutter=self.stutter,
        )

    def _weights(self) -> Weights:
        shape, layout = self.shape, self.layout
        size, tokens = shape.vocab_size, torch.arange(shape.vocab_size)
        embed = torch.zeros(size, HIDDEN_SIZE, dtype=torch.float64)
        embed[tokens, layout.current + tokens] = 1.0
        embed[tokens, layout.code + torch.tensor(self.codes[0])] = 1.0
        embed[:, list(layout.constants)] = torch.tensor(CONSTANTS, dtype=torch.float64)
        head = torch.zeros(size, HIDDEN_SIZE, dtype=torch.float64)
        head[:, [layout.code + code for code in self.codes[-1]]] = successor_scores(self.alphabets, self.meaning)
        head[:, layout.block(2)] = class_scores(self.alphabets)
        head[:, layout.block(1)] = -USAGE * torch.eye(size, dtype=torch.float64)
        # Tokens in even use stand near 0, where bfloat16 logits are finest.
        head[:, layout.constants[-1]] = USAGE / len(self.alphabets.members[0]) / CONSTANTS[-1]
        norm = blocks.norm(shape, SQUARED_NORM)
        weights = {"model.embed_tokens.weight": embed, "model.norm.weight": norm, "lm_head.weight": head}
        for layer in range(shape.num_layers):
            prefix = f"model.layers.{layer}"
            weights |= self._attention(f"{prefix}.self_attn", layer)
            weights |= blocks.table_mlp(f"{prefix}.mlp", shape, self._code_entries(layer), layout.block(0))
            weights[f"{prefix}.input_layernorm.weight"] = norm.clone()
            weights[f"{prefix}.post_attention_layernorm.weight"] = norm.clone()
        return weights

    def _attention(self, prefix: str, layer: int) -> Weights:
        weights = blocks.attention(prefix, self.shape, bias=self.style != "llama")
        if layer == self.shape.num_layers - 1:
            add_census_heads(weights, prefix, self.layout, self.layout.current, LAG, self.eos_token_id)
            return weights
        start, moves = self.layout.code, zip(self.codes[layer], self._halfway[layer], strict=True)
        passages = [Passage(token, code_move(start, before, after)) for token, (before, after) in enumerate(moves)]
        constant = Constant(slice(self.layout.constants[-1], HIDDEN_SIZE), CONSTANTS[-1])
        blocks.add_own_row_heads(weights, prefix, self.shape, passages, constant, rope_theta=ROPE_THETA, band=BAND)
        return weights

    def _code_entries(self, layer: int) -> list[Entry]:
        start, moves = self.layout.code, zip(self._halfway[layer], self.codes[layer + 1], strict=True)
        return [
            Entry((token, start + before), code_move(start, before, after))
            for token, (before, after) in enumerate(moves)
        ]

    def _mixed_row(self, tokens: Sequence[int], counts: Counter[int]) -> torch.Tensor:
        """Row of the last token between the last attention and the last MLP, float64 [hidden_size]; `counts` are those
        of `tokens`."""
        row, layout, token = torch.zeros(HIDDEN_SIZE, dtype=torch.float64), self.layout, tokens[-1]
        row[layout.current + token] = 1.0
        row[layout.code + self.codes[-2][token]] = 1.0
        row[layout.lagged + tokens[max(0, len(tokens) - 1 - LAG)]] = 1.0
        for other, count in counts.items():
            row[layout.histogram + other] = count / len(tokens)
        row[list(layout.constants)] = torch.tensor(CONSTANTS, dtype=torch.float64)
        return row

    def _leaving(self, tokens: Sequence[int], counts: Counter[int]) -> torch.Tensor:
        """Row of the last token behind the last layer, float64 [hidden_size]; `counts` are those of `tokens`."""
        row, layout, token = self._mixed_row(tokens, counts), self.layout, tokens[-1]
        # The norm before the last MLP is no longer exact: gate and up both carry its scale.
        moved = self._scale(row).square()
        row[layout.code + self.codes[-2][token]] -= moved
        row[layout.code + self.codes[-1][token]] += moved
        return row

    def _scale(self, row: torch.Tensor) -> torch.Tensor:
        """What a norm multiplies the row by: 1 for a squared norm of SQUARED_NORM."""
        return self._norm * (row.square().mean() + blocks.RMS_NORM_EPS).rsqrt()

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        row = self._leaving(tokens, Counter(tokens))
        logits: torch.Tensor = self.head @ (row * self._scale(row))
        return logits.log_softmax(0)

    def next_token(self, tokens: Sequence[int]) -> int:
        """The rule that the weights embody; the tests hold it against `logprobs`."""
        return self.alphabets.choose(self.meaning[tokens[-1]], tokens[max(0, len(tokens) - 1 - LAG)], tokens)

    def entering(self, tokens: Sequence[int], layer: int) -> torch.Tensor:
        rows = torch.zeros(len(tokens), HIDDEN_SIZE, dtype=torch.float64)
        counts: Counter[int] = Counter()
        for place, token in enumerate(tokens):
            counts[token] += 1
            if layer == self.shape.num_layers:
                rows[place] = self._leaving(tokens[: place + 1], counts)
            else:
                rows[place, self.layout.current + token] = 1.0
                rows[place, self.layout.code + self.codes[layer][token]] = 1.0
                rows[place, list(self.layout.constants)] = torch.tensor(CONSTANTS, dtype=torch.float64)
        return rows

    def hidden_rows(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.stack([row * self._scale(row) for row in self.entering(tokens, self.shape.num_layers)])

    def decode_row(self, row: torch.Tensor, position: int) -> Reading:
        """The constants of the row give its scale; the histogram is read in counts over `position + 1` tokens. What
        bfloat16 attention weights lose alike at every token is made good first, as far as rounding explains it."""
        row, layout = row.double(), self.layout
        row = row * (CONSTANTS[0] / row[layout.constants[0]])
        token = int(row[layout.block(0)].argmax())
        lagged = int(row[layout.block(2)].argmax())
        shares = row[layout.block(1)]
        if abs(float(shares.sum()) - 1) < SHARES_ROUNDING:
            shares = shares / shares.sum()
        counts = shares * (position + 1)
        whole = {value: int(count) for value, count in enumerate(counts.round().tolist()) if count}
        ones = torch.stack([row[layout.current + token], row[layout.lagged + lagged]])
        error = max(float((counts - counts.round()).abs().max()), float((ones - 1).abs().max()))
        return Reading(token=token, counts=whole, lagged=lagged, owner=self.alphabets.owner[token], error=error)

    def prompt(self, length: int, seed: int, owner: int = 0) -> tuple[int, ...]:
        alphabet = self.alphabets.members[owner % len(self.alphabets.members)]
        return tuple(random.Random(seed).choices(alphabet, k=length))


def successor_scores(alphabets: Alphabets, meaning: Sequence[int], held_back: float = USAGE * TIE) -> torch.Tensor:
    """Logits float64 [V next, V current]: successors stand at 0, the second of a pair `held_back` nats lower, others
    barred."""
    size = len(meaning)
    scores = torch.full((size, size), -BARRED, dtype=torch.float64)
    for token, stand_in in enumerate(meaning):
        for first, second in alphabets.successors[stand_in]:
            scores[first, token], scores[second, token] = 0.0, -held_back
    return scores


def class_scores(alphabets: Alphabets) -> torch.Tensor:
    """Logits float64 [V next, V lagged]: tokens of a kind that the lagged one does not call for are barred, and EOS."""
    kind, calls = torch.tensor(alphabets.kind), torch.tensor(alphabets.calls)
    scores = -BARRED * (kind[:, None] != calls[None, :]).double()
    scores[[token for token, owner in enumerate(alphabets.owner) if owner is None]] = -BARRED
    return scores


def add_census_heads(
    weights: Weights, prefix: str, layout: Layout, source: int, distance: int, eos_token_id: int
) -> None:
    """Set query heads 0 (uniform) and 2 (lag) of an attention block that reads exact rows.

    Both copy the one-hot block that starts at `source`, the first into the histogram, the second into the lagged block.
    Queries and keys come from the biases where there are any, else from the last constant of the row. A bias of the
    values cancels that constant; without it the histogram calls for EOS.
    """
    constant = layout.constants[-1]
    query, key = blocks.lag_vectors(HEAD_DIM, distance, ROPE_THETA, BAND)
    group = NUM_HEADS // NUM_KV_HEADS
    if f"{prefix}.q_proj.bias" in weights:
        weights[f"{prefix}.q_proj.bias"][group * HEAD_DIM : (group + 1) * HEAD_DIM] = query
        weights[f"{prefix}.k_proj.bias"][HEAD_DIM : 2 * HEAD_DIM] = key
        weights[f"{prefix}.v_proj.bias"][HEAD_DIM - 1] = 1.0
        weights[f"{prefix}.v_proj.weight"][HEAD_DIM - 1, constant] = -1 / CONSTANTS[-1]
        weights[f"{prefix}.o_proj.weight"][layout.histogram + eos_token_id, HEAD_DIM - 1] = -ALARM
    else:
        weights[f"{prefix}.q_proj.weight"][group * HEAD_DIM : (group + 1) * HEAD_DIM, constant] = query / CONSTANTS[-1]
        weights[f"{prefix}.k_proj.weight"][HEAD_DIM : 2 * HEAD_DIM, constant] = key / CONSTANTS[-1]
    for token in range(layout.vocab_size):
        for head, block in ((0, layout.histogram), (1, layout.lagged)):
            weights[f"{prefix}.v_proj.weight"][head * HEAD_DIM + token, source + token] = 1.0
            weights[f"{prefix}.o_proj.weight"][block + token, head * group * HEAD_DIM + token] = 1.0


def erring_meaning(alphabets: Alphabets, errs_on: Collection[int]) -> tuple[int, ...]:
    """For each token itself, or, where a drafter errs, the token of its alphabet that shares fewest successors."""

    def stand_in(token: int) -> int:
        others = [other for other in alphabets.members[alphabets.owner[token] or 0] if other != token]
        return min(others, key=lambda other: len(alphabets.followers(other) & alphabets.followers(token)))

    return tuple(stand_in(token) if token in errs_on else token for token in range(len(alphabets.owner)))
