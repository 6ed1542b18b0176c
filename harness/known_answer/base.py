"""Interfaces of the known-answer checkpoints: a target or a drafter whose every answer is known in closed form.

Truth is computed in float64 from the weights as stored, that is, rounded to the checkpoint's dtype.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from harness.known_answer.tokenizer import write_tokenizer

Weights = dict[str, torch.Tensor]
Config = dict[str, Any]
DraftMethod = Literal[
    "STANDALONE",
    "EAGLE",
    "EAGLE3",
    "MTP",
    "NGRAM",
    "EXTRACT_HIDDEN_STATES",
    "MEDUSA",
    "FROZEN_KV_MTP",
    "DFLASH",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one hidden row says about itself.

    `token` is the input token at the row. `counts` maps tokens to how often they occur in the visible history, the
    row's own token included; `lagged` is the token at the target's lag distance; `owner` numbers the alphabet that the
    token belongs to. `state_counts` is what a recurrent state has counted, and `recent` are the last tokens that it
    took in, newest first. All but the token are None where the target does not write them. `error` is the largest
    distance of a decoded quantity from its exact value (in counts for a histogram, in units of a one-hot otherwise).
    """

    token: int
    counts: Mapping[int, int] | None = None
    lagged: int | None = None
    owner: int | None = None
    state_counts: Mapping[int, int] | None = None
    recent: tuple[int, ...] | None = None
    error: float = 0.0


def write_checkpoint(directory: Path, config: Config, weights: Weights) -> None:
    """Write `config.json` and `model.safetensors` into `directory`, which is created."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


class Target(ABC):
    """A target model. `weights` are in the dtype of the checkpoint; `tokens` is always a committed history."""

    config: Config
    weights: Weights

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def eos_token_id(self) -> int:
        return int(self.config["eos_token_id"])

    @abstractmethod
    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Law of the token after `tokens`: natural logarithms, float64 [V]."""

    @abstractmethod
    def hidden_rows(self, tokens: Sequence[int]) -> torch.Tensor:
        """Final-norm output at every position of `tokens`, float64 [n, hidden_size]."""

    def entering(self, tokens: Sequence[int], layer: int) -> torch.Tensor:
        """Residual stream that enters a layer (their number: that leaves the last), float64 [n, hidden_size]."""
        raise NotImplementedError(f"{type(self).__name__} has no closed form of what enters layer {layer}")

    def layer_states(self, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
        """`entering` for several layers at every position of `tokens`, float64 [n, layers, hidden_size]."""
        return torch.stack([self.entering(tokens, layer) for layer in layers], dim=1)

    @abstractmethod
    def decode_row(self, row: torch.Tensor, position: int) -> Reading:
        """Read one hidden row [hidden_size] of any dtype that was computed at `position` (0-based)."""

    @abstractmethod
    def prompt(self, length: int, seed: int, owner: int = 0) -> tuple[int, ...]:
        """A seeded random prompt without EOS, from the alphabet of `owner` where the target has alphabets."""

    def margin(self, tokens: Sequence[int]) -> float:
        """How far (nats) the greedy choice after `tokens` leads."""
        best = self.logprobs(tokens).topk(2).values
        return float(best[0] - best[1])

    def next_token(self, tokens: Sequence[int]) -> int:
        """Greedy choice after `tokens`."""
        return int(self.logprobs(tokens).argmax())

    def greedy(self, prompt: Sequence[int], n: int) -> tuple[int, ...]:
        """The n greedy tokens after `prompt`. EOS does not stop it: cut where the request stops."""
        tokens = list(prompt)
        for _ in range(n):
            tokens.append(self.next_token(tokens))
        return tuple(tokens[len(prompt) :])

    def write(self, directory: Path) -> None:
        """Write the checkpoint and its tokenizer."""
        write_checkpoint(directory, self.config, self.weights)
        write_tokenizer(directory, self.vocab_size, self.eos_token_id)


class Drafter(ABC):
    """A drafter for one target. `config` and `weights` are what its checkpoint holds."""

    method: DraftMethod
    config: Config
    weights: Weights
    target: Target
    guesses: bool = False
    """Whether it errs even where it is not meant to, since some of what decides a token never reaches it."""

    @abstractmethod
    def draft(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        """The k greedy chain drafts after the committed `tokens`, of which the last (the bonus token) has not been an
        input of the target yet; fewer where the drafter has no more to say. Drafters that read hidden rows need at
        least two tokens, else ValueError."""

    def accept_lens(
        self, prompt: Sequence[int], max_new_tokens: int, k: int, stop_token_ids: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Accept length (correct drafts + 1 bonus token) of every verify step of a greedy request.

        The first new token comes from prefill. Steps go on until `max_new_tokens` have been emitted, or one of
        `stop_token_ids` has; an entry is not cut by either.
        """
        return accept_lens(self.target, self.draft, prompt, max_new_tokens, k, stop_token_ids)

    def write(self, directory: Path) -> None:
        """Write the checkpoint and the tokenizer of the target."""
        write_checkpoint(directory, self.config, self.weights)
        write_tokenizer(directory, self.target.vocab_size, self.target.eos_token_id)


def accept_lens(
    target: Target,
    draft: Callable[[Sequence[int], int], Sequence[int]],
    prompt: Sequence[int],
    max_new_tokens: int,
    k: int,
    stop_token_ids: Collection[int] = (),
) -> tuple[int, ...]:
    """`Drafter.accept_lens` for any way to draft: `draft(committed tokens, k)` gives at most k tokens."""
    tokens = [*prompt, target.next_token(prompt)]
    stops = set(stop_token_ids)
    lens: list[int] = []
    while len(tokens) - len(prompt) < max_new_tokens and not stops.intersection(tokens[len(prompt) :]):
        before = len(tokens)
        for drafted in draft(tuple(tokens), k):
            tokens.append(target.next_token(tokens))
            if tokens[-1] != drafted:
                break
        else:
            tokens.append(target.next_token(tokens))
        lens.append(len(tokens) - before)
    return tuple(lens)


def require_history(tokens: Sequence[int], least: int, method: str) -> None:
    """Raise ValueError when `tokens` is too short for a drafter that reads hidden rows."""
    if len(tokens) < least:
        raise ValueError(f"tokens={tuple(tokens)!r}: {method} drafts need at least {least} committed tokens")
