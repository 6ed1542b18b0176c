"""MEDUSA: k heads on the target's last hidden row, each for a token of its own (Cai et al. 2024).

Head i reads the final-norm row that predicted the bonus token and predicts the token i + 1 places behind that one. No
head knows what the others drafted, nor the bonus token itself. Nothing is kept between steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from reference_engine.config import EngineConfig, require
from reference_engine.drafters.base import Drafting, Proposal, ProposeInputs
from reference_engine.drafters.last_row import LastRowDrafter
from reference_engine.model.causal_lm import CausalLM
from reference_engine.model.config import read_raw
from reference_engine.model.layers import Linear
from reference_engine.model.loader import Checkpoint
from reference_engine.sampling.random import RandomSource

LAYOUTS = (("blocks.{head}.layers.{block}", "lm_heads.{head}"), ("{head}.{block}.linear", "{head}.{blocks}"))
"""Names of a residual block and of a head's projection: those of vLLM, and those of FasterDecoding (medusa_lm_head)."""


class _Head:
    """Residual blocks `x + SiLU(W x + b)`, then a projection to the vocabulary."""

    def __init__(self, weights: Checkpoint, target: CausalLM, head: int, num_blocks: int, fc_bias: bool) -> None:
        hidden, vocab = target.config.hidden_size, target.config.vocab_size
        faster_decoding = "0.0.linear.weight" in weights
        block_name, head_name = LAYOUTS[faster_decoding]
        self.blocks = []
        for block in range(num_blocks):
            name = block_name.format(head=head, block=block)
            biases = [weights.take(f"{name}.bias", hidden)] if fc_bias or faster_decoding else []
            self.blocks.append(Linear([weights.take(f"{name}.weight", hidden, hidden)], biases))
        name = head_name.format(head=head, blocks=num_blocks)
        self.lm_head = Linear([weights.take(f"{name}.weight", vocab, hidden)])

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> logits [N, vocab], float32 or wider."""
        for block in self.blocks:
            rows = rows + F.silu(block(rows))
        logits = self.lm_head(rows)
        return logits if logits.dtype == torch.float64 else logits.float()


class MedusaDrafter(LastRowDrafter):
    """Config keys: `num_heads` (or `medusa_num_heads`); `num_hidden_layers` (or `medusa_num_layers`), the residual
    blocks of a head; `medusa_fc_bias`. Heads past the last draft are loaded all the same, so that a damaged one is
    refused."""

    def __init__(self, config: EngineConfig, target: CausalLM, random: RandomSource, num_positions: int) -> None:
        del num_positions
        spec = config.spec
        assert spec is not None
        if spec.model is None:
            raise ValueError("model=None: MEDUSA needs the folder of its heads")
        require(spec.topk == 1, "topk", spec.topk, "MEDUSA drafts chains only; use topk=1")
        super().__init__(config, target, random)
        raw = read_raw(spec.model)
        num_heads, num_blocks = _check(raw, spec.model, target)
        mend = f"must not exceed the {num_heads} heads of {spec.model}, each of which drafts one token"
        require(spec.num_steps <= num_heads, "num_steps", spec.num_steps, mend)
        weights = Checkpoint(spec.model, config.torch_dtype, torch.device(config.device))
        fc_bias = bool(raw.get("medusa_fc_bias", False))
        heads = [_Head(weights, target, head, num_blocks, fc_bias) for head in range(num_heads)]
        weights.finish()
        self.heads = heads[: spec.num_steps]

    def ingest(self, inputs: ProposeInputs, next_token_ids: torch.Tensor) -> Drafting:
        self.num_forwards += 1
        rows = self.last_row(inputs, next_token_ids)
        return Drafting(self.heads[0](rows), rows)

    def draft(self, inputs: ProposeInputs, drafting: Drafting) -> Proposal:
        self.choose(inputs, drafting)
        for head in self.heads[1 : inputs.num_steps]:
            drafting.logits = head(drafting.features)
            self.choose(inputs, drafting)
        return self.chain(inputs, drafting)


def _check(raw: dict[str, Any], path: object, target: CausalLM) -> tuple[int, int]:
    """Heads and blocks of each. Raises ValueError for what is no set of heads for this target, or not supported."""
    names = raw.get("architectures") or ["MedusaModel"]
    if names[0] != "MedusaModel":
        raise ValueError(f"{path}: architectures={names[0]!r} is not a set of MEDUSA heads")
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = raw.get(name), getattr(target.config, name)
        if ours not in (None, theirs):
            raise ValueError(f"{path}: {name}={ours} must equal the target's {theirs}")
    if raw.get("truncated_vocab_size") not in (None, target.config.vocab_size):
        raise ValueError(f"{path}: truncated_vocab_size={raw['truncated_vocab_size']}: a reduced one is not supported")
    if raw.get("original_lm_head"):
        raise ValueError(f"{path}: original_lm_head=True is not supported; every head needs a projection of its own")
    counts = []
    for key in ("num_heads", "num_hidden_layers"):
        value = raw.get(key, raw.get(f"medusa_{key.replace('hidden_', '')}"))
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{path}: {key}={value!r} must be a positive integer")
        counts.append(value)
    return counts[0], counts[1]
