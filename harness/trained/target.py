"""The target: an ordinary Llama model over bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.known_answer.base import Config, Weights
from harness.known_answer.blocks import Shape, Style, base_config
from harness.trained.layers import EPS, DecoderLayer, RMSNorm, initialise
from harness.trained.text import EOS, VOCAB_SIZE

SHAPE = Shape(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=384,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
)
MAX_POSITIONS = 512
DTYPE = torch.bfloat16
"""How weights are stored."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the target makes of token ids [B, T]: final-norm rows [B, T, hidden], logits [B, T, V], and the residual
    streams [B, T, hidden] that enter its layers, the one that leaves the last behind them."""

    ids: Tensor
    hidden: Tensor
    logits: Tensor
    streams: tuple[Tensor, ...]


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size)


class Llama(nn.Module):
    """Its parameters have the names of a Hugging Face checkpoint."""

    def __init__(self, shape: Shape = SHAPE) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        initialise(self)

    def forward(self, ids: Tensor) -> Lesson:
        x, positions = self.model.embed_tokens(ids), torch.arange(ids.shape[1])
        streams = [x]
        for layer in self.model.layers:
            streams.append(layer(streams[-1], positions, []))
        hidden = self.model.norm(streams[-1])
        return Lesson(ids, hidden, self.lm_head(hidden), tuple(streams))

    def losses(self, ids: Tensor) -> dict[str, Tensor]:
        """Mean loss (nats) per token of windows [B, T]."""
        logits = self(ids[:, :-1]).logits
        return {"target": F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())}

    def config(self) -> Config:
        return checkpoint_config(self.shape)

    def tensors(self) -> Weights:
        return dict(self.state_dict())


def checkpoint_config(shape: Shape, style: Style = "llama") -> Config:
    """`config.json` of a plain checkpoint."""
    return base_config(shape, EOS, DTYPE, style) | {"rms_norm_eps": EPS, "max_position_embeddings": MAX_POSITIONS}
