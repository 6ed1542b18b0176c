"""DFLASH: a block of drafts out of one pass that is not causal (block diffusion; Chen et al. 2026, format of z-lab).

The block is the bonus token and k mask tokens behind it, at their own positions; the row of a mask token predicts the
token that stands there. Every row of the block sees the whole block and, before it, a row for each committed token
that the target has processed: `hidden_norm(fc(states of several target layers))`, from which each layer takes keys and
values as it does from its own rows. These are the drafter's KV; what the block writes behind them is scratch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from reference_engine.cache.kv import KVCache, attention_context
from reference_engine.config import EngineConfig, pages_for, require
from reference_engine.drafters.base import Drafting, InputShadow, LogitsDrafter, Proposal, ProposeInputs
from reference_engine.model.causal_lm import CausalLM
from reference_engine.model.config import ModelConfig, integers, read_raw
from reference_engine.model.layers import DecoderLayer, Linear, RMSNorm, RotaryEmbedding
from reference_engine.model.loader import Checkpoint
from reference_engine.sampling.random import RandomSource

ARCHITECTURE = "DFlashDraftModel"


class DFlashDrafter(LogitsDrafter):
    """Embeddings and head are the target's. Config keys: `block_size` (a block holds as many drafts less one),
    `dflash_config.mask_token_id` and `dflash_config.target_layer_ids`, which count from the output of layer 0."""

    pending = 1

    def __init__(self, config: EngineConfig, target: CausalLM, random: RandomSource, num_positions: int) -> None:
        spec = config.spec
        assert spec is not None
        if spec.model is None:
            raise ValueError("model=None: DFLASH needs the folder of its draft model")
        require(spec.topk == 1, "topk", spec.topk, "DFLASH drafts chains only; use topk=1")
        super().__init__(spec, target.config.vocab_size, random, config.backend)
        model, device = ModelConfig.load(spec.model), torch.device(config.device)
        block_size, self.mask_token_id, layer_ids = _read(model, target.config)
        mend = f"must be below block_size={block_size} of {spec.model}: the block holds the bonus token too"
        require(spec.num_steps < block_size, "num_steps", spec.num_steps, mend)
        # Auxiliary id i is what enters layer i, which is the output of the layer before.
        self.aux_layer_ids = tuple(layer + 1 for layer in layer_ids)
        self.target = target
        weights = Checkpoint(spec.model, config.torch_dtype, device)
        self.context_length = self.max_positions = model.max_positions
        hidden = model.hidden_size
        self.fc = Linear([weights.take("fc.weight", hidden, len(layer_ids) * target.config.hidden_size)])
        self.hidden_norm = RMSNorm(weights.take("hidden_norm.weight", hidden), model.rms_norm_eps)
        self.layers = [DecoderLayer(model, weights, f"layers.{i}") for i in range(model.num_layers)]
        self.norm = RMSNorm(weights.take("norm.weight", hidden), model.rms_norm_eps)
        weights.finish()
        self.rotary = RotaryEmbedding(model, num_positions, config.torch_dtype, device)
        self.cache = KVCache(config, model, model.num_layers)
        if config.snapshots:
            slots = self.cache.num_slots
            self.shadow = InputShadow(torch.full((slots,), -1), torch.zeros(slots, hidden))

    def caches(self) -> list[KVCache]:
        return [self.cache]

    def ingest(self, inputs: ProposeInputs, next_token_ids: torch.Tensor) -> Drafting:
        """Leaves the output rows of the mask tokens [N, k, hidden] as features."""
        self._write_context(inputs)
        if inputs.all_discarded or inputs.num_steps == 0:
            outputs = inputs.hidden.new_zeros(len(inputs.rows), self.spec.num_steps, len(self.norm.weight))
        else:
            outputs = self._run_block(inputs, next_token_ids)
        return Drafting(self.target.logits(outputs[:, 0]), outputs)

    def draft(self, inputs: ProposeInputs, drafting: Drafting) -> Proposal:
        self.choose(inputs, drafting)
        for index in range(1, inputs.num_steps):
            drafting.logits = self.target.logits(drafting.features[:, index])
            self.choose(inputs, drafting)
        return self.chain(inputs, drafting)

    def _write_context(self, inputs: ProposeInputs) -> None:
        """Keys and values of the processed tokens, at their positions. They replace what blocks have left there."""
        columns = torch.arange(inputs.token_ids.shape[1], device=inputs.rows.device)
        positions = inputs.positions[:, :1] + columns
        valid = (columns < inputs.num_rows[:, None]) & (positions < self.context_length)
        num_pages = pages_for(inputs.max_seq_len, self.cache.page_size)
        context = attention_context(self.cache, inputs.block_table, positions, num_pages, valid=valid)
        features = self.hidden_norm(self.fc(inputs.hidden.flatten(0, 1)))
        rotary = self.rotary(context.positions)
        for layer, cache in zip(self.layers, self.cache.layers, strict=True):
            layer.attention.write(features, rotary, context, cache)
        if self.shadow is not None:
            self.shadow.remember(context.write_slots, inputs.token_ids, features)

    def _run_block(self, inputs: ProposeInputs, next_token_ids: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        size = self.spec.num_steps + 1
        start = inputs.seq_lens - 1
        positions = start[:, None] + torch.arange(size, device=start.device)
        context = attention_context(
            self.cache,
            inputs.block_table,
            positions,
            pages_for(inputs.max_seq_len - 1 + size, self.cache.page_size),
            valid=positions < self.context_length if self.cramped(inputs) else None,
            positions=positions,
            window_start=start,
            # What lies past the last position is not written, so nobody looks at it.
            window_mask=(positions < self.context_length)[:, None].expand(-1, size, -1),
        )
        masks = next_token_ids.new_full((len(start), size - 1), self.mask_token_id)
        x = F.embedding(torch.cat([next_token_ids[:, None], masks], dim=1).flatten(), self.target.embed_tokens)
        rotary = self.rotary(context.positions)
        for layer, cache in zip(self.layers, self.cache.layers, strict=True):
            x = layer(x, rotary, context, cache)
        return self.norm(x).view(len(start), size, -1)[:, 1:]


def _read(model: ModelConfig, target: ModelConfig) -> tuple[int, int, list[int]]:
    """Block size, mask token and target layers. Raises ValueError for what does not fit, or is not supported."""
    if model.architecture != ARCHITECTURE:
        raise ValueError(f"{model.path}: architectures={model.architecture!r} is not a DFLASH draft model")
    raw = read_raw(model.path)
    dflash: dict[str, Any] = raw.get("dflash_config") or {}

    def check(name: str, value: object, fits: bool, right: str) -> None:
        if not fits:
            raise ValueError(f"{model.path}: {name}={value!r}: {right}")

    check("dflash_config", dflash, isinstance(dflash, dict), "must be an object")

    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(model, name), getattr(target, name)
        check(name, ours, ours == theirs, f"must equal the target's {theirs}, whose embeddings and head are shared")
    count = raw.get("num_target_layers", target.num_layers)
    check("num_target_layers", count, count == target.num_layers, f"the target has {target.num_layers}")
    for name in ("causal", "use_swa", "attention_sink_bias"):
        check(f"dflash_config.{name}", dflash.get(name), not dflash.get(name), "is not supported; leave it out")
    block_size = raw.get("block_size", dflash.get("block_size"))
    check("block_size", block_size, isinstance(block_size, int) and block_size > 1, "must be an integer above 1")
    mask, layers = dflash.get("mask_token_id"), dflash.get("target_layer_ids")
    fits = isinstance(mask, int) and 0 <= mask < target.vocab_size
    check("dflash_config.mask_token_id", mask, fits, f"must be an id of the target's vocabulary ({target.vocab_size})")
    fits = bool(layers) and integers(layers, 0, target.num_layers)
    last = target.num_layers - 1
    check("dflash_config.target_layer_ids", layers, fits, f"must name layers of the target, 0..{last}")
    assert isinstance(block_size, int)
    assert isinstance(mask, int)
    return block_size, mask, list(layers or ())
