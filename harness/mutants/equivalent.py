"""General mutants that no check can see: `equivalent.toml` has them with the reason."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_suffix(".toml")

EQUIVALENT: Mapping[str, str] = {
    one["id"]: one["reason"] for one in tomllib.loads(FILE.read_text(encoding="utf-8"))["equivalent"]
}
"""Reasons by id."""
