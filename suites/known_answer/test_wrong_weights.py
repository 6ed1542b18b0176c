"""Nothing in a checkpoint is idle: a tensor that is zero, or left at its initial value, changes what is known."""

from __future__ import annotations

import pytest
import torch

from harness.known_answer.base import Weights
from harness.known_answer.dense import target_states
from harness.known_answer.dense_drafters import dense_drafter
from suites.registration import suite

suite(seconds=2.1, stage="cpu", needs="cpu")

INITIAL = 0.02
"""Standard deviation of a freshly initialised matrix; norm weights start at 1 and biases at 0."""
SCALE_ONLY = ("layernorm", "norm.weight", "hidden_norm")
"""Norm weights scale a row as a whole: a wrong one need not change a greedy choice, but rows and logprobs it does."""


def fresh(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 1:
        return torch.zeros_like(tensor) if name.endswith("bias") else torch.ones_like(tensor)
    generator = torch.Generator().manual_seed(len(name))
    return INITIAL * torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def with_fresh(weights: Weights, name: str) -> Weights:
    return weights | {name: fresh(name, weights[name])}


@pytest.mark.parametrize("family", ["walk", "law", "census"])
def test_a_target_tensor_left_at_its_initial_value_is_noticed(families, family):
    """By its hidden rows or its logprobs, and, unless it is a norm weight, by its greedy choices."""
    built = families(family, "float32")
    for model in (built.target, built.drafters["standalone"].model, built.drafters["mtp"].target):
        tokens = model.prompt(12, seed=3)
        known = target_states(model.config, model.weights, tokens)
        for name in model.weights:
            if beside_bias(model.weights, name):
                continue
            states = target_states(model.config, with_fresh(model.weights, name), tokens)
            moved = max((states.hidden - known.hidden).abs().max(), (states.logprobs - known.logprobs).abs().max())
            assert moved > 1e-3, name
            if not name.endswith(SCALE_ONLY):
                assert not torch.equal(states.logprobs.argmax(-1), known.logprobs.argmax(-1)), name


def beside_bias(weights: Weights, name: str) -> bool:
    """Queries and keys that a bias holds: their matrix is zero, and a little noise leaves the peak where it is."""
    return name.endswith(("q_proj.weight", "k_proj.weight")) and name.replace("weight", "bias") in weights


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "medusa", "frozen_kv_mtp", "dflash"])
@pytest.mark.parametrize("family", ["walk", "law", "census"])
def test_a_drafter_tensor_left_at_its_initial_value_is_noticed(families, family, name):
    built = families(family, "float32").drafters[name]
    target = built.target.config, built.target.weights
    tokens = built.target.prompt(14, seed=3, owner=1)
    k = 8 if name == "medusa" else 4  # every head of MEDUSA drafts one token
    histories = [(*tokens[:end], built.target.next_token(tokens[:end])) for end in (9, 11, 14)]
    for tensor in built.weights:
        if tensor in built.target.weights or tensor in ("embed_tokens.weight", "t2d") or tensor.endswith(SCALE_ONLY):
            continue
        if beside_bias(built.weights, tensor):
            continue
        wrong = dense_drafter(built.config, with_fresh(built.weights, tensor), target)
        assert any(wrong.draft(past, k) != built.draft(past, k) for past in histories), tensor


def test_one_perturbed_entry_is_noticed(families):
    target = families("walk", "float32").target
    for name, place in (("lm_head.weight", (5, 70)), ("model.layers.2.mlp.down_proj.weight", (80, 3))):
        weights = dict(target.weights)
        weights[name] = weights[name].clone()
        weights[name][place] += 0.01
        states = target_states(target.config, weights, range(64))
        known = torch.stack([target.logprobs([token]) for token in range(64)])
        assert (states.logprobs - known).abs().max() > 1e-5
