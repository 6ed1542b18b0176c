"""A folder in which one command measures: checkpoints, source trees, recordings. It is gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from transformers.utils import logging

from ci.perf import checkpoints, gate, timed, trees

BUILD = trees.ROOT / "build"


@dataclass(slots=True, kw_only=True)
class Workplace:
    folder: Path
    checkpoints: Path
    console: Console

    def source(self, name: str, sources: dict[str, str]) -> Path:
        """A source tree from git, below this folder."""
        return trees.extract(sources, self.folder / name)

    def count(self, root: Path, only: Sequence[str] = ()) -> dict[str, float]:
        with self.console.status("counting"):
            return gate.count(root, self.folder / "counted.json", self.checkpoints, only)

    def record(self, base: Path, head: Path, blocks: int, pairs: int, only: Sequence[str] = ()) -> timed.Recording:
        with self.console.status("timing") as status:
            return timed.record(
                base,
                head,
                self.checkpoints,
                self.folder,
                blocks=blocks,
                pairs=pairs,
                only=only,
                on_block=lambda done: status.update(f"timing: block {done} of {blocks}"),
            )

    def measure(self, base: Path, head: Path, pairs: int) -> gate.Measure:
        return lambda blocks, only: self.record(base, head, blocks, pairs, only)


@contextmanager
def workplace(console: Console) -> Iterator[Workplace]:
    BUILD.mkdir(exist_ok=True)
    # It draws a bar for each checkpoint that it writes.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers gives it no types
    with TemporaryDirectory(dir=BUILD, prefix="perf-") as name:
        folder = Path(name)
        (folder / "checkpoints").mkdir()
        checkpoints.write_all(folder / "checkpoints")
        yield Workplace(folder=folder, checkpoints=folder / "checkpoints", console=console)
