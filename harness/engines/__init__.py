"""Engine adapters by name. To add one: a file beside this one with an `EngineFactory`, and one line in `ENGINES`.

An adapter is imported only when it is asked for, so that a missing engine costs nothing and breaks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from harness.contract import EngineFactory


def _lazy(module: str, factory: str) -> Callable[[], EngineFactory]:
    def make() -> EngineFactory:
        made: EngineFactory = getattr(import_module(f"harness.engines.{module}"), factory)()
        return made

    return make


ENGINES: dict[str, Callable[[], EngineFactory]] = {
    "reference": _lazy("reference", "ReferenceFactory"),
    "transformers": _lazy("transformers", "TransformersFactory"),
}


def engine_factory(name: str) -> EngineFactory:
    """The factory registered under `name`. Raises ValueError naming the engines that there are."""
    if name not in ENGINES:
        raise ValueError(f"engine={name!r}: must be one of {', '.join(sorted(ENGINES))}")
    return ENGINES[name]()
