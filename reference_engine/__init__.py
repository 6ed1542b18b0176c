"""A small, readable, correct engine with speculative decoding: the baseline that every check passes on.

Data flows forward: request -> batch -> draft -> verify -> commit -> output. Start at `engine.py`.
"""

from reference_engine.config import EngineConfig, SpecConfig
from reference_engine.engine import LLMEngine
from reference_engine.request import RequestOutput, SamplingParams

__all__ = ["EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams", "SpecConfig"]
