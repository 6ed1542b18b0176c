"""Drafters by the name that `SpecConfig.method` uses. A new one is one file here and one line below."""

from __future__ import annotations

from collections.abc import Callable

from reference_engine.config import EngineConfig
from reference_engine.drafters.base import Drafter
from reference_engine.drafters.custom import CustomDrafter
from reference_engine.drafters.dflash import DFlashDrafter
from reference_engine.drafters.eagle import EagleDrafter
from reference_engine.drafters.eagle3 import Eagle3Drafter
from reference_engine.drafters.extract_hidden_states import ExtractHiddenStatesDrafter
from reference_engine.drafters.frozen_kv_mtp import FrozenKVMTPDrafter
from reference_engine.drafters.medusa import MedusaDrafter
from reference_engine.drafters.mtp import MTPDrafter
from reference_engine.drafters.ngram import NgramDrafter
from reference_engine.drafters.standalone import StandaloneDrafter
from reference_engine.model.causal_lm import CausalLM
from reference_engine.sampling.random import RandomSource

DRAFTERS: dict[str, Callable[[EngineConfig, CausalLM, RandomSource, int], Drafter]] = {
    "STANDALONE": StandaloneDrafter,
    "EAGLE": EagleDrafter,
    "EAGLE3": Eagle3Drafter,
    "MTP": MTPDrafter,
    "NGRAM": NgramDrafter,
    "EXTRACT_HIDDEN_STATES": ExtractHiddenStatesDrafter,
    "MEDUSA": MedusaDrafter,
    "FROZEN_KV_MTP": FrozenKVMTPDrafter,
    "DFLASH": DFlashDrafter,
    "CUSTOM": CustomDrafter,
}


def load_drafter(config: EngineConfig, target: CausalLM, random: RandomSource, num_positions: int) -> Drafter | None:
    """The drafter that the configuration names; ValueError when it does not exist or does not fit the target."""
    if config.spec is None:
        return None
    if config.spec.method not in DRAFTERS:
        raise ValueError(f"method={config.spec.method!r}: known drafters are {', '.join(DRAFTERS)}")
    return DRAFTERS[config.spec.method](config, target, random, num_positions)
