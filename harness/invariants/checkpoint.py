"""The few facts of the target that a run names only through its setup: vocabulary size and end-of-sequence ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.contract import Run


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def vocab_size(run: Run) -> int | None:
    """`vocab_size` of the target's config.json (or of its `text_config`); None when the target is no local folder."""
    config = _read(Path(run.setup.target) / "config.json")
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def eos_token_ids(run: Run) -> frozenset[int]:
    """`eos_token_id` of config.json and generation_config.json together; empty when the target is no local folder."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _read(Path(run.setup.target) / name).get("eos_token_id")
        found.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    return frozenset(found)
