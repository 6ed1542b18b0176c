"""The bug zoo: faults that real engines had, planted in the reference engine. Each must be seen by the invariants that
it names, and nothing else may be red.

One family = one file with a tuple `MUTANTS`, after a class of docs/bug-catalogue.md, or of several features at once;
`FAMILIES` registers it. The engine does not know that there are mutants: an edit of its source takes the place of a
module before that is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from harness.mutants.base import BadMutant, Edit, Mutant

FAMILIES = (
    "stride_alias",
    "shape_contract",
    "overshoot",
    "kv_state",
    "position_ids",
    "aux_states",
    "vocab_mapping",
    "numerics",
    "scheduler",
    "overlap",
    "metrics",
    "config_validation",
    "memory_leak",
    "losslessness",
    "logprobs",
    "grammar",
    "prefix_cache",
    "padding",
    "performance",
    "combinations",
)

__all__ = ["FAMILIES", "BadMutant", "Edit", "Mutant", "family", "from_folder", "zoo"]


def family(name: str) -> tuple[Mutant, ...]:
    """The mutants of one file."""
    mutants: tuple[Mutant, ...] = import_module(f"harness.mutants.{name}").MUTANTS
    return mutants


def zoo() -> dict[str, Mutant]:
    """All of ours, by id."""
    return _by_id(mutant for name in FAMILIES for mutant in family(name))


def from_folder(folder: Path) -> dict[str, Mutant]:
    """The mutants of every Python file in a folder outside the package, in the form of a family."""
    found: list[Mutant] = []
    for path in sorted(folder.glob("*.py")):
        spec = spec_from_file_location(f"mutants_from.{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        mutants = getattr(module, "MUTANTS", None)
        if not isinstance(mutants, tuple) or not all(isinstance(one, Mutant) for one in mutants):
            raise BadMutant(f"{path}: must define MUTANTS, a tuple of harness.mutants.Mutant")
        found += mutants
    if not found:
        raise BadMutant(f"--from {folder}: no Python file with MUTANTS lies there")
    return _by_id(found)


def _by_id(mutants: Iterable[Mutant]) -> dict[str, Mutant]:
    found: dict[str, Mutant] = {}
    for mutant in mutants:
        if mutant.id in found:
            raise BadMutant(f"id={mutant.id!r}: two mutants are called so; ids must be unique")
        found[mutant.id] = mutant
    return found
