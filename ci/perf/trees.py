"""Source trees side by side in one process: each has modules of its own, under the same names.

So two states of the source take turns within milliseconds, on the same core, with the same torch.
"""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("reference_engine", "kernels", "harness")
"""The folders that are measured. What measures, `ci`, is always the one of this checkout."""
OURS = (*PARTS, "ci")
DEFINITIONS = "ci.perf.workloads"
COUNTING = "ci.perf.counted"


@dataclass(frozen=True, slots=True)
class Tree:
    """Modules that were imported from `root`, by name."""

    root: Path
    modules: Mapping[str, ModuleType]

    @property
    def definitions(self) -> Any:
        """`ci.perf.workloads`, bound to this tree."""
        return self.modules[DEFINITIONS]

    def take_over(self) -> None:
        """The same for good, and in no time: all trees have modules of the same names."""
        sys.modules.update(self.modules)

    @contextmanager
    def active(self) -> Iterator[None]:
        """What is imported late comes from this tree, too."""
        before = _take_out()
        sys.modules.update(self.modules)
        sys.path.insert(0, str(self.root))
        try:
            yield
        finally:
            sys.path.remove(str(self.root))
            _take_out()
            sys.modules.update(before)


def load(root: Path) -> Tree:
    """Import the tree afresh. Raises ValueError when a module of it came from elsewhere."""
    before = _take_out()
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        for name in (DEFINITIONS, COUNTING):
            importlib.import_module(name)
        modules = _take_out()
    finally:
        sys.path.remove(str(root))
        _take_out()
        sys.modules.update(before)
    strays = [name for name, module in modules.items() if _is_part(name) and not _lies_in(module, root)]
    if strays:
        raise ValueError(f"source tree {root}: {strays[0]} was imported from elsewhere; is a folder of it missing?")
    return Tree(root, modules)


def _take_out() -> dict[str, ModuleType]:
    ours = [name for name in sys.modules if name.partition(".")[0] in OURS]
    return {name: sys.modules.pop(name) for name in ours}


def _is_part(name: str) -> bool:
    return name.partition(".")[0] in PARTS


def _lies_in(module: ModuleType, root: Path) -> bool:
    return module.__file__ is not None and Path(module.__file__).is_relative_to(root)


def git(*arguments: str, root: Path = ROOT) -> str:
    """What git prints. Raises ValueError with its last line when it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(f"git {' '.join(arguments)}: {said[-1]}")
    return done.stdout.strip()


def hashes(commit: str = "HEAD", root: Path = ROOT) -> dict[str, str]:
    """Git's hash of each measured folder. A squash or a rebase leaves them as they are."""
    return {part: git("rev-parse", f"{commit}:{part}", root=root) for part in PARTS}


def uncommitted(root: Path = ROOT) -> list[str]:
    """Files of the measured folders that differ from HEAD."""
    return [line[3:] for line in git("status", "--porcelain", "--", *PARTS, root=root).splitlines()]


def extract(sources: Mapping[str, str], folder: Path, root: Path = ROOT) -> Path:
    """Write the folders with these hashes into `folder`. Raises ValueError for one that this clone does not have."""
    for part, tree in sources.items():
        if part not in PARTS:
            raise ValueError(f"sources.{part}: must be one of {', '.join(PARTS)}")
        done = subprocess.run(
            ["git", "archive", "--format=tar", f"--prefix={part}/", tree], cwd=root, capture_output=True, check=False
        )
        if done.returncode != 0:
            raise ValueError(
                f"sources.{part}={tree}: this clone does not have that source; "
                "`git fetch --unshallow` brings the history, `draftproof perf accept` starts from what is here"
            )
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
    return folder
