"""Files of tables that are named by their heading: `runners.toml`, `stages.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

Entry = TypeVar("Entry", bound=msgspec.Struct)


def read(path: Path, kind: type[Entry]) -> dict[str, Entry]:
    """The tables by name, in the order of the file; `kind` has a field `name`. Raises ValueError naming the field that
    does not fit."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
        named = {name: {"name": name, **entry} for name, entry in entries.items()}
        return msgspec.convert(named, dict[str, kind])  # type: ignore[valid-type]  # a type of this call
    except (msgspec.ValidationError, tomllib.TOMLDecodeError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
