"""Loading a checkpoint into transformers without its leniency: nothing may run with a weight that was not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from harness.contract import DType, Refused

# transformers measures every token of the vocabulary behind this text when it compiles stop strings.
_STOP_STRING_PROBE = "abcdef"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A causal language model in memory. `tokenizer` is None when the directory has none."""

    model: Any
    tokenizer: Any
    eos_token_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def max_positions(self) -> int:
        return int(self.model.config.max_position_embeddings)

    def decode(self, token_ids: Sequence[int]) -> str | None:
        if self.tokenizer is None:
            return None
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def stop_string_problem(self) -> str | None:
        """Why stop strings cannot be used with this checkpoint, or None."""
        if self.tokenizer is None:
            return "the checkpoint has no tokenizer; add tokenizer.json"
        probe = self.tokenizer(_STOP_STRING_PROBE, add_special_tokens=False)["input_ids"]
        if self.tokenizer.decode(probe) != _STOP_STRING_PROBE:
            return f"transformers needs a tokenizer that can encode {_STOP_STRING_PROBE!r}"
        return None


def load_checkpoint(directory: Path, dtype: DType, device: str, role: str) -> Checkpoint:
    """Load a Hugging Face directory in `dtype`; `role` names it in errors. Raises `Refused` when it does not fit."""
    if not (directory / "config.json").is_file():
        raise Refused(f"{role}={directory}: there is no config.json; name a Hugging Face checkpoint directory")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            # Not to run with them: so that they are named in the refusal below.
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise Refused(f"{role}={directory}: transformers cannot load it: {error}") from error
    model, info = loaded
    faults = {name: sorted(map(str, keys)) for name, keys in info.items() if keys}
    if faults:
        raise Refused(f"{role}={directory}: the tensors do not fit the config: {faults}")
    eos = model.generation_config.eos_token_id
    # Sampling defaults that a checkpoint carries would leak into requests that did not ask for them.
    model.generation_config = new_generation_config()
    return Checkpoint(model.to(device).eval(), _load_tokenizer(directory), _as_ids(eos))


def new_generation_config(**fields: Any) -> GenerationConfig:
    """transformers' constructor has no types."""
    return GenerationConfig(**fields)  # type: ignore[no-untyped-call]


def _load_tokenizer(directory: Path) -> Any:
    if not (directory / "tokenizer.json").is_file():
        return None
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def _as_ids(eos: int | Sequence[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
