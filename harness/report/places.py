"""Where results go: a folder that cannot take them is found before anything runs, and no file is ever half there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def require_folder(option: str, folder: Path) -> None:
    """Make the folder when it is missing. Raises ValueError that names both unless files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(os.sysconf("SC_PAGE_SIZE")))
    except OSError as error:
        mend = "name a folder that can be written to"
        raise ValueError(f"{option} {folder}: {error.strerror or error}; {mend}") from error


def write_whole(path: Path, text: str) -> None:
    """The file with all of the text, or as it was. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
