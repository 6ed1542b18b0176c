"""Engine adapters by name. To add one: a file beside this one with an `EngineFactory`, and one line in `ENGINES`.
One that lies elsewhere is named `module:factory`: docs/adapters.md.

An adapter is imported only when it is asked for, so that a missing engine costs nothing and breaks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from harness.contract import EngineFactory
from harness.engines import environments
from harness.engines.environments import Recipe


@dataclass(frozen=True, slots=True)
class Adapter:
    """`module` beside this one, and the `factory` in it; `package` is what its version is that of, unless it is called
    as the engine is. One that is `isolated` runs in a process of its own, in the environment of a version: its
    module says in `RECIPE` how one is made, and its factory takes a version or the path of a Python. `slow`: each
    set-up takes seconds to start, so that conformance tests take turns."""

    module: str
    factory: str
    isolated: bool = False
    package: str = ""
    slow: bool = False


ENGINES = {
    "openai": Adapter("openai", "OpenAIFactory", isolated=True, slow=True),
    "reference": Adapter("reference", "ReferenceFactory", package="draftproof"),
    "transformers": Adapter("transformers", "TransformersFactory", isolated=True),
    "llama.cpp": Adapter("llama_cpp", "LlamaCppFactory", isolated=True),
    "sglang": Adapter("sglang", "SglangFactory", isolated=True, slow=True),
    "vllm": Adapter("vllm", "VllmFactory", isolated=True, slow=True),
}


def engine_factory(spec: str) -> EngineFactory:
    """The factory of NAME, NAME@VERSION, NAME@PATH of a Python that has the engine, or openai@SERVER. Raises ValueError
    naming the engines that there are, or what is missing."""
    name, _, where = spec.partition("@")
    if name not in ENGINES:
        raise ValueError(f"engine={name!r}: must be one of {', '.join(sorted(ENGINES))}")
    adapter = ENGINES[name]
    if where and not adapter.isolated:
        raise ValueError(f"engine={spec!r}: {name} runs in this environment, in the one version that it has")
    make = getattr(import_module(f"harness.engines.{adapter.module}"), adapter.factory)
    made: EngineFactory = make(where) if adapter.isolated else make()
    return made


def is_isolated(spec: str) -> bool:
    """Whether NAME, NAME@VERSION or NAME@PATH runs in a process of its own."""
    adapter = _adapter(spec)
    return adapter is not None and adapter.isolated


def is_slow(spec: str) -> bool:
    """Whether NAME, NAME@VERSION or NAME@PATH takes seconds to start."""
    adapter = _adapter(spec)
    return adapter is not None and adapter.slow


def _adapter(spec: str) -> Adapter | None:
    return ENGINES.get(spec.partition("@")[0])


def version_of(spec: str) -> str:
    """The version of an engine, in the environment that it has or in ours; empty when there is none."""
    name, _, where = spec.partition("@")
    recipe = recipes().get(name)
    if recipe is not None:
        return environments.version_of(recipe, recipe.python(where))
    adapter = _adapter(spec)
    if adapter is not None and adapter.isolated:
        try:
            return str(getattr(engine_factory(spec), "version", ""))
        except ValueError:
            return ""
    try:
        return version((adapter.package if adapter is not None else "") or name)
    except PackageNotFoundError:
        return ""


def recipes() -> dict[str, Recipe]:
    """How environments are made, of every engine that has its own."""
    isolated = {name: import_module(f"harness.engines.{one.module}") for name, one in ENGINES.items() if one.isolated}
    return {name: module.RECIPE for name, module in isolated.items() if hasattr(module, "RECIPE")}
