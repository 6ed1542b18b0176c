"""MTP (MiMo layout): one Qwen2 decoder layer that lies in the target's own checkpoint. The target is the Llama model,
with the biases that Qwen2 has at zero."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from harness.known_answer.base import Config, Weights
from harness.known_answer.blocks import Shape
from harness.known_answer.drafters.mtp import mtp_config
from harness.trained.feature import FeatureDrafter
from harness.trained.layers import DecoderLayer, KeysValues, RMSNorm, initialise
from harness.trained.target import Llama, checkpoint_config


class Layer(DecoderLayer):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, bias=True)
        hidden = shape.hidden_size
        self.token_layernorm, self.hidden_layernorm = RMSNorm(hidden), RMSNorm(hidden)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.final_layernorm = RMSNorm(hidden)

    def join(self, embeddings: Tensor, features: Tensor) -> Tensor:
        both = [self.hidden_layernorm(features), self.token_layernorm(embeddings)]
        rows: Tensor = self.input_proj(torch.cat(both, dim=-1))
        return rows


class Layers(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.mtp_layers = nn.ModuleList([Layer(shape)])


class Mtp(FeatureDrafter):
    method = "MTP"

    def __init__(self, target: Llama) -> None:
        super().__init__(target)
        self.shape, self.target_tensors = target.shape, target.tensors()
        self.model = Layers(dataclasses.replace(target.shape, num_layers=1))
        initialise(self)

    def step(self, embeddings: Tensor, features: Tensor, positions: Tensor, past: list[KeysValues]) -> Tensor:
        layer = self.model.mtp_layers[0]
        assert isinstance(layer, Layer)
        if self.training and not past:
            # vLLM feeds zeros in place of the embedding at position 0: half of the windows are trained on that.
            embeddings = embeddings.clone()
            embeddings[::2, 0] = 0
        rows: Tensor = layer.final_layernorm(layer(layer.join(embeddings, features), positions, past))
        return rows

    def config(self) -> Config:
        return mtp_config(checkpoint_config(self.shape, "mimo"), num_layers=1)

    def tensors(self) -> Weights:
        own = {name: tensor for name, tensor in super().tensors().items() if name != "embed_tokens.weight"}
        biases = {
            name.removesuffix("weight") + "bias": torch.zeros(len(tensor))
            for name, tensor in self.target_tensors.items()
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        }
        return self.target_tensors | biases | own
