"""General mutants that no check can see, with the reason: by the id that `draftproof mutants general` prints."""

from __future__ import annotations

from collections.abc import Mapping

EQUIVALENT: Mapping[str, str] = {}
