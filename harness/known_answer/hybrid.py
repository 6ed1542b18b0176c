"""The hybrid target: a census that is kept in a recurrent state, beside the one that attention takes of the KV.

The last layer of a census model gets recurrent heads beside its attention (see `reference_engine/model/recurrent.py`
for the architecture; `DraftproofHybridForCausalLM`). Both heads add up the one-hot tokens. The fast one halves what it
has with every token, so its sum, written in binary, spells the last tokens: the one d positions back is the one whose
entry has the digit 2**-d. The slow one forgets nothing and counts. A census row gets two more blocks:
`recent`, the sum of the fast head, and `seen`, that of the slow one over `SEEN_UNIT`.

Which pair may follow is told by the lagged token, hence by KV and positions; which of the pair follows, by the counts
of the recurrent state. Fewer than 600 tokens long, a request says what that of a census target would say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from harness.known_answer.base import Reading, Weights
from harness.known_answer.census import CONSTANTS, HIDDEN_SIZE, USAGE, CensusTarget, Layout, successor_scores
from harness.known_answer.markov import EOS_TOKEN_ID

OWNERS, ALPHABET_SIZE = 4, 8
FAST, SLOW = 0, 1
"""The recurrent heads."""
OPEN = 64.0
"""Bias at which a gate is exactly 1 in every dtype; at 0 it is exactly one half."""
SEEN_UNIT = 32.0
COUNT = 0.5
"""How far (nats) a token falls with every time that it was seen. A choice within a pair leads by half of it."""
DIGITS = 16
"""Tokens that can be read back from the fast head. With float32 rows the last of them still stands out by 0.99."""


@dataclass(frozen=True, slots=True)
class HybridLayout(Layout):
    """Two blocks more, behind the marks and the spare places of a census row."""

    @property
    def recent(self) -> int:
        return self.spare + 4

    @property
    def seen(self) -> int:
        return self.recent + self.vocab_size


class HybridTarget(CensusTarget):
    """`state` is the closed form of the recurrent state. Keys tell the owner of a token, queries look at all owners, so
    that a state names them as well."""

    def __init__(
        self,
        *,
        eos_token_id: int = EOS_TOKEN_ID,
        dtype: torch.dtype = torch.float32,
        num_layers: int = 2,
        seed: int = 0,
        intermediate_size: int = 0,
    ) -> None:
        super().__init__(
            owners=OWNERS,
            alphabet_size=ALPHABET_SIZE,
            eos_token_id=eos_token_id,
            dtype=dtype,
            num_layers=num_layers,
            seed=seed,
            style="draftproof_hybrid",
            intermediate_size=intermediate_size,
        )
        self.config |= {
            "recurrent_layers": [num_layers - 1],
            "recurrent_num_heads": 2,
            "recurrent_key_dim": OWNERS,
            "recurrent_value_dim": self.vocab_size,
        }

    @staticmethod
    def new_layout(vocab_size: int) -> HybridLayout:
        layout = HybridLayout(vocab_size)
        assert layout.seen + vocab_size <= layout.constants[0], "the blocks of a row overlap"
        return layout

    @property
    def places(self) -> HybridLayout:
        assert isinstance(self.layout, HybridLayout)
        return self.layout

    def _weights(self) -> Weights:
        layout, alphabets = self.places, self.alphabets
        weights = super()._weights()
        head = weights["lm_head.weight"]
        head[:, [layout.code + code for code in self.final_codes]] = successor_scores(
            alphabets, self.meaning, COUNT / 2
        )
        # Of attention's histogram only the alarm is heard.
        head[:, layout.block(1)] = 0.0
        head[self.eos_token_id, layout.histogram + self.eos_token_id] = -USAGE
        head[:, layout.constants[-1]] = 0.0
        for members in alphabets.members:
            seen = layout.seen + torch.tensor(members)
            # Against the mean of the alphabet: logits stay near 0 however long a request grows.
            head[torch.tensor(members)[:, None], seen] = COUNT * SEEN_UNIT / len(members)
            head[torch.tensor(members), seen] -= COUNT * SEEN_UNIT
        return weights | self._recurrent(f"model.layers.{self.shape.num_layers - 1}.recurrent")

    def _recurrent(self, prefix: str) -> Weights:
        layout, size = self.places, self.shape.vocab_size
        tokens = torch.arange(size)
        keys = torch.zeros(2, OWNERS, HIDDEN_SIZE, dtype=torch.float64)
        values = torch.zeros(2, size, HIDDEN_SIZE, dtype=torch.float64)
        out = torch.zeros(HIDDEN_SIZE, 2, size, dtype=torch.float64)
        queries = torch.zeros_like(keys)
        keys[:, [owner or 0 for owner in self.alphabets.owner], layout.current + tokens] = 1.0
        queries[:, :, layout.constants[-1]] = 1 / CONSTANTS[-1]
        values[:, tokens, layout.current + tokens] = 1.0
        out[layout.recent + tokens, FAST, tokens] = 1.0
        out[layout.seen + tokens, SLOW, tokens] = 1 / SEEN_UNIT
        return {
            f"{prefix}.q_proj.weight": queries.flatten(0, 1),
            f"{prefix}.k_proj.weight": keys.flatten(0, 1),
            f"{prefix}.v_proj.weight": values.flatten(0, 1),
            f"{prefix}.g_proj.weight": torch.zeros(2, HIDDEN_SIZE, dtype=torch.float64),
            f"{prefix}.g_proj.bias": torch.tensor([0.0, OPEN], dtype=torch.float64),
            f"{prefix}.o_proj.weight": out.flatten(1, 2),
        }

    def state(self, tokens: Sequence[int]) -> torch.Tensor:
        """Recurrent state after `tokens`, float64 [1 layer, 2 heads, owners, V]. Exact as it stands in float32 for the
        slow head; for the fast one to 24 binary digits."""
        ids = torch.tensor(tokens, dtype=torch.long)
        owners = torch.tensor([self.alphabets.owner[token] or 0 for token in tokens], dtype=torch.long)
        shares = 2.0 ** -torch.arange(len(tokens) - 1, -1, -1, dtype=torch.float64)
        state = torch.zeros(1, 2, OWNERS, self.vocab_size, dtype=torch.float64)
        for head, share in ((FAST, shares), (SLOW, torch.ones_like(shares))):
            state[0, head].index_put_((owners, ids), share, accumulate=True)
        return state

    def _mixed_row(self, tokens: Sequence[int], counts: Counter[int]) -> torch.Tensor:
        row, layout = super()._mixed_row(tokens, counts), self.places
        recent, seen = [0.0] * self.vocab_size, [0.0] * self.vocab_size
        # What lies further back than the digits of a float64 adds nothing.
        for distance, token in enumerate(reversed(tokens[-64:])):
            recent[token] += 2.0**-distance
        for token, count in counts.items():
            seen[token] = count / SEEN_UNIT
        row[layout.recent : layout.seen + self.vocab_size] = torch.tensor(recent + seen, dtype=torch.float64)
        return row

    def decode_row(self, row: torch.Tensor, position: int) -> Reading:
        """As that of a census row, and what the recurrent state behind it has taken in. A state that lacks tokens, has
        some twice or another request's shows in `state_counts`, one that is ahead or behind also in `recent`."""
        reading, layout = super().decode_row(row, position), self.places
        exact = row.double() * (CONSTANTS[0] / row[layout.constants[0]].double())
        seen = exact[layout.seen : layout.seen + self.vocab_size] * SEEN_UNIT
        counts = {token: int(count) for token, count in enumerate(seen.round().tolist()) if count}
        recent = exact[layout.recent : layout.recent + self.vocab_size].clone()
        tokens: list[int] = []
        while len(tokens) < DIGITS and float(recent.max()) > 0.5:
            tokens.append(int(recent.argmax()))
            recent[tokens[-1]] -= 1.0
            recent *= 2.0
        error = max(reading.error, float((seen - seen.round()).abs().max()))
        return replace(reading, state_counts=counts, recent=tuple(tokens), error=error)
