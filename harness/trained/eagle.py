"""EAGLE: one decoder layer over `fc(cat(embedding, feature))`, without input norm or final norm. Its residual stream is
what the target's `lm_head` reads, and the next feature."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from harness.known_answer.base import Config
from harness.trained.feature import FeatureDrafter
from harness.trained.layers import DecoderLayer, KeysValues, initialise
from harness.trained.target import Llama, checkpoint_config


class Eagle(FeatureDrafter):
    method = "EAGLE"

    def __init__(self, target: Llama) -> None:
        super().__init__(target)
        self.shape = dataclasses.replace(target.shape, num_layers=1)
        hidden = self.shape.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(self.shape, input_norm=False)])
        initialise(self)

    def step(self, embeddings: Tensor, features: Tensor, positions: Tensor, past: list[KeysValues]) -> Tensor:
        rows: Tensor = self.layers[0](self.fc(torch.cat([embeddings, features], dim=-1)), positions, past)
        return rows

    def config(self) -> Config:
        return checkpoint_config(self.shape) | {"architectures": ["LlamaForCausalLMEagle"]}
