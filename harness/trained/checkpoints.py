"""The trained checkpoints on disk: written, checked, read back, and named in an engine's set-up."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol, TypeVar

from safetensors.torch import load_file
from torch import nn

from harness.contract import DrafterSetup, EngineSetup
from harness.known_answer.base import Config, Weights, write_checkpoint
from harness.known_answer.blocks import Shape, stored
from harness.known_answer.drafters.mtp import write_configuration
from harness.trained.eagle import Eagle
from harness.trained.eagle3 import Eagle3
from harness.trained.mtp import Mtp
from harness.trained.standalone import Standalone
from harness.trained.target import DTYPE, SHAPE, Llama
from harness.trained.tokenizer import write_tokenizer

WEIGHTS = Path(__file__).resolve().parents[2] / "models"
SUMS = "SHA256SUMS"
Drafter = Standalone | Eagle | Eagle3 | Mtp
DRAFTERS: dict[str, type[Drafter]] = {
    "standalone": Standalone,
    "eagle": Eagle,
    "eagle3": Eagle3,
    "mtp": Mtp,
}
"""By folder. To add one: a file like its neighbours, and a line here."""


class Checkpointed(Protocol):
    def config(self) -> Config: ...

    def tensors(self) -> Weights: ...


M = TypeVar("M", bound=nn.Module)


def write(model: Checkpointed, directory: Path) -> None:
    """Write a model's checkpoint, in `DTYPE`, and the tokenizer."""
    config = model.config()
    write_checkpoint(directory, config, stored(model.tensors(), DTYPE))
    write_tokenizer(directory)
    if config["model_type"] == "mimo":
        write_configuration(directory)


def read(model: M, directory: Path) -> M:
    """Fill a model, in float32, with what `write` stored. Raises KeyError naming a tensor that is not there."""
    weights = load_file(directory / "model.safetensors")
    shared = {"embed_tokens.weight"} - weights.keys()
    own = {name: weights[name].float() for name in model.state_dict() if name not in shared}
    model.load_state_dict(own, strict=not shared)
    return model.eval()


def target(root: Path = WEIGHTS, shape: Shape = SHAPE) -> Llama:
    return read(Llama(shape), root / "target").requires_grad_(False)


def drafter(folder: str, root: Path = WEIGHTS) -> Drafter:
    return read(DRAFTERS[folder](target(root)), root / folder).requires_grad_(False)


def setup(folder: str | None, k: int = 3, root: Path = WEIGHTS, **changes: object) -> EngineSetup:
    """An engine with the trained target and a drafter that drafts chains of k; without a drafter where it is None."""
    if folder is None:
        return EngineSetup(target=root / "target", **changes)  # type: ignore[arg-type]  # fields of EngineSetup
    within = folder == "mtp"
    chain = DrafterSetup.chain(DRAFTERS[folder].method, k, None if within else root / folder)
    return EngineSetup(target=root / (folder if within else "target"), drafter=chain, **changes)  # type: ignore[arg-type]  # as above


def sums(root: Path) -> dict[str, str]:
    """SHA-256 of every file below `root` but the list itself, by its path there."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != SUMS)
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_sums(root: Path) -> None:
    """In the form of `sha256sum`."""
    lines = [f"{digest}  {name}\n" for name, digest in sums(root).items()]
    (root / SUMS).write_text("".join(lines), encoding="utf-8")


def damaged(root: Path = WEIGHTS) -> list[str]:
    """Files below `root` that are not as the list says, are missing, or are not in it. ValueError without a list."""
    if not (root / SUMS).is_file():
        raise ValueError(
            f"root={str(root)!r}: no {SUMS} there; give a folder that `draftproof models train` has finished"
        )
    pairs = (line.split("  ", 1) for line in (root / SUMS).read_text(encoding="utf-8").splitlines())
    listed, found = {name: digest for digest, name in pairs}, sums(root)
    return sorted(name for name in listed.keys() | found.keys() if listed.get(name) != found.get(name))
