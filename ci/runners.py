"""Classes of machines that stages run on, as `runners.toml` lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from ci import named

FILE = Path(__file__).with_name("runners.toml")


class RunnerClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of machines. `name` is the capability that suites ask for. `memory_gib` is what its GPU has at least;
    `driver` and `cuda` are version bounds, empty for any. `baseline`: under which key measured times are kept."""

    name: str
    title: str
    labels: tuple[str, ...]
    baseline: str
    hosted: bool = False
    vendor: Literal["", "nvidia", "amd"] = ""
    architectures: tuple[str, ...] = ()
    memory_gib: float = 0.0
    driver: str = ""
    cuda: str = ""

    @property
    def has_gpu(self) -> bool:
        return bool(self.vendor)


def load(path: Path = FILE) -> dict[str, RunnerClass]:
    """The classes by name, in the order of the file. Raises ValueError naming the field that does not fit."""
    classes = named.read(path, RunnerClass)
    for one in classes.values():
        _validate(one, path)
    return classes


def _validate(one: RunnerClass, path: Path) -> None:
    if not one.labels:
        raise ValueError(f"{path}: {one.name}: labels=[]: a job must ask for a label at least")
    if one.has_gpu != bool(one.architectures):
        raise ValueError(f"{path}: {one.name}: vendor and architectures go together: give both, or neither")
    if not one.hosted and "self-hosted" not in one.labels:
        raise ValueError(f'{path}: {one.name}: labels lack "self-hosted"; add it, or say hosted = true')
    for field in ("driver", "cuda"):
        try:
            SpecifierSet(getattr(one, field))
        except InvalidSpecifier as error:
            raise ValueError(
                f"{path}: {one.name}: {field}={getattr(one, field)!r}: write bounds as pip does, such as >=12.4,<14"
            ) from error
