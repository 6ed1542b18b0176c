"""Engines in processes of their own: the pipe, the process, and the engine that stands for it here."""

from harness.engines.isolated.base import Dialect, Words
from harness.engines.isolated.engine import IsolatedEngine, IsolatedFactory
from harness.engines.isolated.process import Deadlines, EngineFailure, Worker

__all__ = ["Deadlines", "Dialect", "EngineFailure", "IsolatedEngine", "IsolatedFactory", "Words", "Worker"]
