"""Put a mutant's source in the place of the engine's, for the life of this process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from harness.mutants.base import source_of


@dataclass(frozen=True)
class EditedModules(MetaPathFinder):
    """Finds the modules of `files`, by dotted name, in the files given there. A package keeps its folder, given in
    `packages`: the modules beside it are not edited."""

    files: Mapping[str, Path]
    packages: Mapping[str, list[str]]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname not in self.files:
            return None
        return spec_from_file_location(
            fullname, self.files[fullname], submodule_search_locations=self.packages.get(fullname)
        )

    def go_first(self) -> None:
        """Before any other finder: pytest puts one of its own in front, and that one reads our modules, too."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        sys.meta_path.insert(0, self)

    def strays(self) -> list[str]:
        """Modules that were imported from elsewhere, so that their edit was never there."""
        imported = {name: sys.modules[name] for name in self.files if name in sys.modules}
        return [name for name, module in imported.items() if module.__file__ != str(self.files[name])]


def activate(sources: Mapping[str, str], folder: Path) -> EditedModules:
    """Write `sources` (text by module) into `folder` and import the modules from there from now on.

    They are files because Triton reads the source of its functions. None may have been imported before.
    """
    origins = {name: source_of(name) for name in sources}
    packages = {name: [str(origin.parent)] for name, origin in origins.items() if origin.name == "__init__.py"}
    files = {name: folder / f"{name}.py" for name in sources}
    for name, text in sources.items():
        assert name not in sys.modules, f"{name} was imported before it could be edited"
        files[name].write_text(text, encoding="utf-8")
    finder = EditedModules(files, packages)
    finder.go_first()
    return finder
