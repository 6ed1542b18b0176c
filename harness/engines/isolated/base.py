"""What an adapter of an engine in another process says of it: what it claims, and how it is spoken to."""

from __future__ import annotations

from typing import Any, Protocol

from harness.contract import Capabilities, EngineSetup, Request

Words = dict[str, Any]
"""Plain JSON values, as the worker of that engine wants them."""


class Dialect(Protocol):
    """Pure functions of the engine's version and of what is asked for: they can be read and tested without the
    engine."""

    def capabilities(self, version: str, setup: EngineSetup) -> Capabilities:
        """What this version claims under `setup`."""
        ...

    def start(self, version: str, setup: EngineSetup) -> Words:
        """The set-up in the engine's own words; two that are equal mean the same engine. Raises `Refused` naming the
        field that cannot be said in them."""
        ...

    def request(self, request: Request, setup: EngineSetup) -> Words:
        """The request in the engine's own words. Raises `Refused`."""
        ...
