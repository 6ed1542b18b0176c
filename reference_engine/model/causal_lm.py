"""Decoder-only language model: Llama, Qwen2, Qwen3, the target part of MiMo, and our hybrid of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from reference_engine.cache.kv import AttentionContext, KVCache
from reference_engine.model.config import TARGETS, ModelConfig
from reference_engine.model.layers import DecoderLayer, Linear, RMSNorm, RotaryEmbedding
from reference_engine.model.loader import Checkpoint
from reference_engine.model.recurrent import HybridLayer


class CausalLM:
    """Loaded from a Hugging Face checkpoint. Stateless: the KV cache is handed in.

    `checkpoint` stays open until `finish_loading`, so that an MTP drafter can take its layers from the same files.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, num_positions: int) -> None:
        config = ModelConfig.load(path)
        if config.architecture not in TARGETS:
            raise ValueError(
                f"{path}: {config.architecture} is a drafter; a target must be one of {', '.join(TARGETS)}"
            )
        weights = Checkpoint(path, dtype, device)
        hidden, vocab = config.hidden_size, config.vocab_size
        self.config = config
        self.dtype = dtype
        self.checkpoint: Checkpoint | None = weights
        self.embed_tokens = weights.take("model.embed_tokens.weight", vocab, hidden)
        self.layers = [
            (HybridLayer if i in config.recurrent_layers else DecoderLayer)(config, weights, f"model.layers.{i}")
            for i in range(config.num_layers)
        ]
        self.norm = RMSNorm(weights.take("model.norm.weight", hidden), config.rms_norm_eps)
        tied = config.tie_word_embeddings and "lm_head.weight" not in weights
        self.lm_head = Linear([self.embed_tokens if tied else weights.take("lm_head.weight", vocab, hidden)])
        self.rotary = RotaryEmbedding(config, num_positions, dtype, device)

    def finish_loading(self, *, with_mtp: bool) -> None:
        """Refuse leftover tensors; MTP layers are allowed to be left when nobody drafts with them."""
        assert self.checkpoint is not None
        self.checkpoint.finish(r"rotary_emb\.inv_freq$" + ("" if with_mtp else r"|^model\.mtp_layers\."))
        self.checkpoint = None

    def forward(
        self, input_ids: torch.Tensor, context: AttentionContext, cache: KVCache, aux_layer_ids: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """input_ids [N, Q] -> final-norm hidden rows [N, Q, hidden], and the auxiliary states [N, Q, aux * hidden].

        Auxiliary id i is the residual stream that enters layer i; num_layers is the one that leaves the last.
        """
        x = F.embedding(input_ids.reshape(-1), self.embed_tokens)
        rotary = self.rotary(context.positions)
        streams: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in aux_layer_ids:
                streams[index] = x
            x = layer(x, rotary, context, cache.layers[index])
        streams[len(self.layers)] = x
        aux = [streams[layer_id] for layer_id in aux_layer_ids]
        hidden = self.norm(x)
        shape = (*input_ids.shape, -1)
        return hidden.view(shape), torch.cat(aux, dim=-1).view(shape) if aux else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., vocab], float32 or wider."""
        logits = self.lm_head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)
        return logits if logits.dtype == torch.float64 else logits.float()
