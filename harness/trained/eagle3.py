"""EAGLE3: one decoder layer that reads three auxiliary states of the target, with an `lm_head` of its own over the ids
that the text holds. The residual stream before the final norm is the next feature."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from harness.known_answer.base import Config, Weights
from harness.known_answer.blocks import Shape
from harness.known_answer.drafters.eagle3 import vocabulary_maps
from harness.trained.feature import FeatureDrafter
from harness.trained.layers import MLP, Attention, KeysValues, RMSNorm, initialise
from harness.trained.target import Lesson, Llama, checkpoint_config
from harness.trained.text import ALPHABET

AUX_LAYER_IDS = (1, 3, 5)
"""i = the residual stream that enters layer i; the number of layers = the one that leaves the last."""
DRAFT_VOCAB = tuple(sorted(ALPHABET))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden), RMSNorm(hidden)
        self.self_attn = Attention(shape, input_size=2 * hidden)
        self.post_attention_layernorm = RMSNorm(hidden)
        self.mlp = MLP(shape)


class Eagle3(FeatureDrafter):
    method = "EAGLE3"

    def __init__(self, target: Llama) -> None:
        super().__init__(target)
        self.shape = dataclasses.replace(target.shape, num_layers=1)
        hidden = self.shape.hidden_size
        self.fc = nn.Linear(len(AUX_LAYER_IDS) * hidden, hidden, bias=False)
        self.midlayer = Layer(self.shape)
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, len(DRAFT_VOCAB), bias=False)
        self.register_buffer("draft_vocab", torch.tensor(DRAFT_VOCAB), persistent=False)
        initialise(self)

    def features(self, lesson: Lesson) -> Tensor:
        states: Tensor = self.fc(torch.cat([lesson.streams[layer] for layer in AUX_LAYER_IDS], dim=-1))
        return states

    def step(self, embeddings: Tensor, features: Tensor, positions: Tensor, past: list[KeysValues]) -> Tensor:
        layer = self.midlayer
        both = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(features)], dim=-1)
        x: Tensor = features + layer.self_attn(both, positions, past)
        out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return out

    def logits(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(rows))
        return logits

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.get_buffer("draft_vocab")[draft_ids]

    def law(self, logits: Tensor) -> Tensor:
        return logits[..., self.get_buffer("draft_vocab")]

    def config(self) -> Config:
        return checkpoint_config(self.shape) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(DRAFT_VOCAB),
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYER_IDS),
            "eagle_config": {
                # SGLang counts layers by what leaves them.
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in AUX_LAYER_IDS],
                "use_aux_hidden_state": True,
            },
        }

    def tensors(self) -> Weights:
        return super().tensors() | vocabulary_maps(self.shape.vocab_size, DRAFT_VOCAB)
