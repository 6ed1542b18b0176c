"""Dense float64 forward passes of the drafters that read hidden rows, and their greedy recursion.

`features` are the hidden rows that the drafter is fed for the committed tokens: row j belongs to tokens[j]. They are an
argument, so that a caller can shift, permute or age them and see what the drafts become.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from harness.known_answer.base import Config, Weights
from harness.known_answer.dense import Layers, TargetStates, target_states

Rows = torch.Tensor
Step = Callable[[Rows, Rows], tuple[Rows, Rows]]
"""(embedding rows, feature rows) -> (output rows to feed back, logit rows)."""


def eagle_step(config: Config, weights: Weights, target_weights: Weights) -> Step:
    layers = Layers(config, weights)
    head = target_weights["lm_head.weight"].double()

    def step(embeddings: Rows, features: Rows) -> tuple[Rows, Rows]:
        rows = layers.linear("fc", torch.cat([embeddings, features], dim=-1))
        out = layers.decoder("layers.0", rows, rows)
        return out, out @ head.T

    return step


def eagle3_step(config: Config, weights: Weights) -> Step:
    layers = Layers(config, weights)

    def step(embeddings: Rows, features: Rows) -> tuple[Rows, Rows]:
        normed = layers.norm("midlayer.input_layernorm", embeddings), layers.norm("midlayer.hidden_norm", features)
        out = layers.decoder("midlayer", features, torch.cat(normed, dim=-1))
        return out, layers.linear("lm_head", layers.norm("norm", out))

    return step


def mtp_step(config: Config, weights: Weights, layer: int) -> Step:
    layers, prefix = Layers(config, weights), f"model.mtp_layers.{layer}"

    def step(embeddings: Rows, features: Rows) -> tuple[Rows, Rows]:
        hidden = layers.norm(f"{prefix}.hidden_layernorm", features)
        token = layers.norm(f"{prefix}.token_layernorm", embeddings)
        rows = layers.linear(f"{prefix}.input_proj", torch.cat([hidden, token], dim=-1))
        rows = layers.decoder(prefix, rows, layers.norm(f"{prefix}.input_layernorm", rows))
        out = layers.norm(f"{prefix}.final_layernorm", rows)
        return out, layers.linear("lm_head", out)

    return step


def draft_recursion(
    step: Step, embed: Rows, tokens: Sequence[int], features: Rows, k: int, d2t: Rows | None
) -> list[int]:
    """Greedy drafts of a one-layer drafter. `features` [n - 1, width]: row j goes with the embedding of tokens[j+1]."""
    ids, fed, drafts = list(tokens[1:]), features, []
    for _ in range(k):
        out, logits = step(embed[torch.tensor(ids)], fed)
        choice = int(logits[-1].argmax())
        drafts.append(choice if d2t is None else choice + int(d2t[choice]))
        ids.append(drafts[-1])
        fed = torch.cat([fed, out[-1:]])
    return drafts


def eagle_draft(
    config: Config, weights: Weights, target_weights: Weights, tokens: Sequence[int], features: Rows, k: int
) -> tuple[int, ...]:
    """`features` are the target's final-norm rows [n - 1, H] of all committed tokens but the last."""
    embed = target_weights["model.embed_tokens.weight"].double()
    return tuple(draft_recursion(eagle_step(config, weights, target_weights), embed, tokens, features, k, None))


def eagle3_features(config: Config, weights: Weights, states: TargetStates) -> Rows:
    """`fc` of the three auxiliary states named in the drafter's config, float64 [n, H]."""
    ids = config["eagle_aux_hidden_state_layer_ids"]
    return Layers(config, weights).linear("fc", torch.cat([states.entering[layer] for layer in ids], dim=-1))


def eagle3_draft(
    config: Config, weights: Weights, target_weights: Weights, tokens: Sequence[int], features: Rows, k: int
) -> tuple[int, ...]:
    """`features` are `eagle3_features` rows [n - 1, H]."""
    embed = target_weights["model.embed_tokens.weight"].double()
    return tuple(draft_recursion(eagle3_step(config, weights), embed, tokens, features, k, weights.get("d2t")))


def mtp_draft(config: Config, weights: Weights, tokens: Sequence[int], features: Rows, k: int) -> tuple[int, ...]:
    """`features` are the target's final-norm rows [n - 1, H]; `weights` the whole checkpoint."""
    embed = weights["model.embed_tokens.weight"].double()
    num_layers = int(config["num_nextn_predict_layers"])
    ids, fed, drafts = list(tokens[1:]), features, []
    for layer in range(min(k, num_layers)):
        out, logits = mtp_step(config, weights, layer)(embed[torch.tensor(ids)], fed)
        drafts.append(int(logits[-1].argmax()))
        if layer < num_layers - 1:
            # The next layer reads this layer's rows, each with the embedding one token further on.
            ids, fed = [*ids[1:], drafts[-1]], out
        else:
            ids, fed = [*ids, drafts[-1]], torch.cat([fed, out[-1:]])
    last = mtp_step(config, weights, num_layers - 1)
    while len(drafts) < k:
        out, logits = last(embed[torch.tensor(ids)], fed)
        drafts.append(int(logits[-1].argmax()))
        ids, fed = [*ids, drafts[-1]], torch.cat([fed, out[-1:]])
    return tuple(drafts)


def draft(
    config: Config, weights: Weights, target: tuple[Config, Weights], tokens: Sequence[int], k: int
) -> tuple[int, ...]:
    """Greedy drafts after `tokens` of any checkpoint in a known layout, told apart by its `architectures`.

    `target` is the target's config and weights. Raises ValueError for an unknown architecture.
    """
    architecture = config["architectures"][0]
    states = target_states(*target, tokens[:-1])
    if architecture == "LlamaForCausalLMEagle":
        return eagle_draft(config, weights, target[1], tokens, states.hidden, k)
    if architecture == "LlamaForCausalLMEagle3":
        return eagle3_draft(config, weights, target[1], tokens, eagle3_features(config, weights, states), k)
    if architecture == "MiMoForCausalLM":
        return mtp_draft(config, weights, tokens, states.hidden, k)
    raise ValueError(f"architectures={config['architectures']!r}: must name an EAGLE, EAGLE3 or MiMo checkpoint")
