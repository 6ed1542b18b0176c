"""Dense forward passes of the drafters that read hidden rows, and their greedy recursion.

`features` are the rows that a drafter is fed for the committed tokens: row j belongs to tokens[j]. They are an argument
of `draft`, so that a caller can shift, permute or age them and see what the drafts become.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch.nn.functional import silu

from harness.known_answer.base import Config, Weights
from harness.known_answer.blocks import stored
from harness.known_answer.dense import Layers, rotate, target_states, wide

Rows = torch.Tensor


class DenseDrafter(ABC):
    """A drafter checkpoint and the target that it belongs to (its own checkpoint in the case of MTP), in `dtype`."""

    def __init__(
        self, config: Config, weights: Weights, target: tuple[Config, Weights], dtype: torch.dtype = torch.float64
    ) -> None:
        # Cast once: a tensor of the right dtype passes through `Layers` as it is.
        target_config, target_weights = target[0], stored(target[1], dtype)
        self.config, self.layers = config, Layers(config, stored(weights, dtype), dtype)
        self.target = target_config, target_weights
        self.embed = target_weights["model.embed_tokens.weight"]
        self.d2t = weights.get("d2t")
        self.num_layers = int(config.get("num_nextn_predict_layers", 1))

    def features(self, tokens: Sequence[int]) -> Rows:
        """Target rows [n, H] that the drafter is fed: final-norm output, unless the layout reads something else."""
        return target_states(*self.target, tokens, self.layers.dtype).hidden

    @abstractmethod
    def step(self, layer: int, embeddings: Rows, features: Rows) -> tuple[Rows, Rows]:
        """Forward over whole sequences of rows: (output rows that are fed back, logits [n, draft V])."""

    def draft(self, tokens: Sequence[int], k: int, features: Rows | None = None) -> tuple[int, ...]:
        """Greedy chain drafts after the committed `tokens`, the last of which was no input of the target yet.

        `features` [n - 1, H] default to what the target gives. Row j goes with the embedding of tokens[j+1]. Layer
        i + 1 reads the output rows of layer i, each with the embedding one token further on; after the last layer has
        run, it goes on at the following positions.
        """
        fed = self.features(tokens[:-1]) if features is None else features
        ids, drafts = list(tokens[1:]), []
        for step in range(k):
            layer = min(step, self.num_layers - 1)
            out, logits = self.step(layer, self.embed[torch.tensor(ids)], fed)
            choice = int(logits[-1].argmax())
            drafts.append(choice if self.d2t is None else choice + int(self.d2t[choice]))
            if layer < self.num_layers - 1:
                ids, fed = [*ids[1:], drafts[-1]], out
            else:
                ids, fed = [*ids, drafts[-1]], torch.cat([fed, out[-1:]])
        return tuple(drafts)


class DenseEagle(DenseDrafter):
    def step(self, layer: int, embeddings: Rows, features: Rows) -> tuple[Rows, Rows]:
        rows = self.layers.linear("fc", torch.cat([embeddings, features], dim=-1))
        out = self.layers.decoder(f"layers.{layer}", rows, rows)
        return out, Layers(*self.target, self.layers.dtype).linear("lm_head", out)


class DenseEagle3(DenseDrafter):
    def features(self, tokens: Sequence[int]) -> Rows:
        """`fc` of the auxiliary states that the drafter's config names."""
        entering = target_states(*self.target, tokens, self.layers.dtype).entering
        states = [entering[layer] for layer in self.config["eagle_aux_hidden_state_layer_ids"]]
        return self.layers.linear("fc", torch.cat(states, dim=-1))

    def step(self, layer: int, embeddings: Rows, features: Rows) -> tuple[Rows, Rows]:
        del layer
        norm = self.layers.norm
        normed = norm("midlayer.input_layernorm", embeddings), norm("midlayer.hidden_norm", features)
        out = self.layers.decoder("midlayer", features, torch.cat(normed, dim=-1))
        return out, self.layers.linear("lm_head", norm("norm", out))


class DenseMtp(DenseDrafter):
    def step(self, layer: int, embeddings: Rows, features: Rows) -> tuple[Rows, Rows]:
        norm, prefix = self.layers.norm, f"model.mtp_layers.{layer}"
        normed = norm(f"{prefix}.hidden_layernorm", features), norm(f"{prefix}.token_layernorm", embeddings)
        rows = self.layers.linear(f"{prefix}.input_proj", torch.cat(normed, dim=-1))
        rows = self.layers.decoder(prefix, rows, norm(f"{prefix}.input_layernorm", rows))
        out = norm(f"{prefix}.final_layernorm", rows)
        return out, self.layers.linear("lm_head", out)


class DenseMedusa(DenseDrafter):
    def step(self, layer: int, embeddings: Rows, features: Rows) -> tuple[Rows, Rows]:
        """Head `layer` on every row; it feeds nothing back and reads no embedding."""
        del embeddings
        rows = features
        for block in range(int(self.config["num_hidden_layers"])):
            rows = rows + silu(self.layers.linear(f"blocks.{layer}.layers.{block}", rows))
        return features, self.layers.linear(f"lm_heads.{layer}", rows)

    def draft(self, tokens: Sequence[int], k: int, features: Rows | None = None) -> tuple[int, ...]:
        fed = self.features(tokens[:-1]) if features is None else features
        return tuple(int(self.step(head, fed, fed)[1][-1].argmax()) for head in range(k))


class DenseFrozen(DenseDrafter):
    """Keys and values of the target are an argument of `recur`, so that a caller can spoil them."""

    def target_kv(self, tokens: Sequence[int]) -> list[tuple[Rows, Rows]]:
        """By target layer: keys, turned by their positions, and values [n, kv_heads, head_dim]."""
        layers = Layers(*self.target, self.layers.dtype)
        kv = []
        entering = target_states(*self.target, tokens, layers.dtype).entering
        for index in range(int(self.target[0]["num_hidden_layers"])):
            prefix = f"model.layers.{index}"
            normed = layers.norm(f"{prefix}.input_layernorm", entering[index])
            shape = (len(tokens), -1, int(layers.config["head_dim"]))
            key, value = (layers.linear(f"{prefix}.self_attn.{name}_proj", normed).view(shape) for name in "kv")
            kv.append((rotate(key, float(layers.config["rope_theta"])), value))
        return kv

    def step(self, layer: int, embeddings: Rows, features: Rows) -> tuple[Rows, Rows]:
        raise NotImplementedError("a step needs the target's KV: see `recur`")

    def recur(self, tokens: Sequence[int], k: int, fed: Rows, kv: list[tuple[Rows, Rows]]) -> tuple[int, ...]:
        """Drafts after `tokens`, from the last of the rows `fed` on, over the KV of tokens[:-1]."""
        row, token = fed[-1:], tokens[-1]
        drafts: list[int] = []
        for _ in range(k):
            x = self.layers.linear("pre_projection", torch.cat([self.embed[[token]], row], dim=-1))
            for index, source in enumerate(self.config["target_kv_layer_ids"]):
                prefix = f"model.layers.{index}"
                normed = self.layers.norm(f"{prefix}.input_layernorm", x)
                x = x + self._attend(f"{prefix}.self_attn", normed, kv[source])
                x = x + self.layers.mlp(f"{prefix}.mlp", self.layers.norm(f"{prefix}.post_attention_layernorm", x))
            x = self.layers.norm("model.norm", x)
            token = int(self.layers.linear("lm_head", x)[0].argmax())
            row = self.layers.linear("post_projection", x)
            drafts.append(token)
        return tuple(drafts)

    def _attend(self, prefix: str, row: Rows, kv: tuple[Rows, Rows]) -> Rows:
        """One query at the position of the last key."""
        keys, values = kv
        dim = keys.shape[2]
        query = self.layers.linear(f"{prefix}.q_proj", row).view(1, -1, dim)
        query = rotate(query.expand(len(keys), -1, -1), float(self.config["rope_theta"]))[-1]
        group = len(query) // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        peaks = wide(torch.einsum("hd,khd->hk", query, keys) / math.sqrt(dim)).softmax(-1).to(row.dtype)
        return self.layers.linear(f"{prefix}.o_proj", torch.einsum("hk,khd->hd", peaks, values).reshape(1, -1))

    def draft(self, tokens: Sequence[int], k: int, features: Rows | None = None) -> tuple[int, ...]:
        fed = self.features(tokens[:-1]) if features is None else features
        return self.recur(tokens, k, fed, self.target_kv(tokens[:-1]))


class DenseDFlash(DenseDrafter):
    causal = False
    """True is what a block must not be."""

    def features(self, tokens: Sequence[int]) -> Rows:
        """`hidden_norm(fc(...))` of the outputs of the target layers that the drafter's config names."""
        entering = target_states(*self.target, tokens, self.layers.dtype).entering
        states = [entering[layer + 1] for layer in self.config["dflash_config"]["target_layer_ids"]]
        return self.layers.norm("hidden_norm", self.layers.linear("fc", torch.cat(states, dim=-1)))

    def step(self, layer: int, embeddings: Rows, features: Rows) -> tuple[Rows, Rows]:
        """The whole block, whose embeddings these are, behind its context rows."""
        del layer
        x = embeddings
        for index in range(int(self.config["num_hidden_layers"])):
            prefix = f"layers.{index}"
            x = x + self._attend(f"{prefix}.self_attn", self.layers.norm(f"{prefix}.input_layernorm", x), features)
            x = x + self.layers.mlp(f"{prefix}.mlp", self.layers.norm(f"{prefix}.post_attention_layernorm", x))
        x = self.layers.norm("norm", x)
        return x, Layers(*self.target, self.layers.dtype).linear("lm_head", x)

    def _attend(self, prefix: str, block: Rows, context: Rows) -> Rows:
        """Attention of the block over the context and all of itself; row j of the two stands at position j. A causal
        block looks as far as each row itself."""
        dim, theta, both = int(self.config["head_dim"]), float(self.config["rope_theta"]), torch.cat([context, block])
        query, key, value = (
            self.layers.linear(f"{prefix}.{name}_proj", both).view(len(both), -1, dim) for name in "qkv"
        )
        query = rotate(self.layers.norm(f"{prefix}.q_norm", query), theta)[len(context) :]
        key = rotate(self.layers.norm(f"{prefix}.k_norm", key), theta)
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = wide(torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(dim))
        if self.causal:
            ahead = torch.ones(len(block), len(both), dtype=torch.bool).triu(len(context) + 1)
            scores = scores.masked_fill(ahead, -torch.inf)
        peaks = scores.softmax(-1).to(block.dtype)
        mixed = torch.einsum("hqk,khd->qhd", peaks, value)
        return self.layers.linear(f"{prefix}.o_proj", mixed.reshape(len(block), -1))

    def draft(self, tokens: Sequence[int], k: int, features: Rows | None = None) -> tuple[int, ...]:
        fed = self.features(tokens[:-1]) if features is None else features
        ids = [tokens[-1], *[int(self.config["dflash_config"]["mask_token_id"])] * k]
        return tuple(self.step(0, self.embed[torch.tensor(ids)], fed)[1][1:].argmax(-1).tolist())


ARCHITECTURES: dict[str, type[DenseDrafter]] = {
    "LlamaForCausalLMEagle": DenseEagle,
    "LlamaForCausalLMEagle3": DenseEagle3,
    "MiMoForCausalLM": DenseMtp,
    "DraftproofHybridForCausalLM": DenseMtp,
    "MedusaModel": DenseMedusa,
    "LlamaForCausalLMFrozenKVMTP": DenseFrozen,
    "DFlashDraftModel": DenseDFlash,
}


def dense_drafter(
    config: Config, weights: Weights, target: tuple[Config, Weights], dtype: torch.dtype = torch.float64
) -> DenseDrafter:
    """The forward pass for the first of the config's `architectures`; ValueError when it is not a known one."""
    name = config["architectures"][0]
    if name not in ARCHITECTURES:
        raise ValueError(f"architectures={config['architectures']!r}: must be one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name](config, weights, target, dtype)
