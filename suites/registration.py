"""What a suite says about itself to the plan of CI."""

from __future__ import annotations


def suite(*, seconds: float, stage: str, needs: str) -> None:
    """Register the file that calls this: about how many seconds its tests take one after another, in which stage of
    `ci/stages.toml` they run, and the class of `ci/runners.toml` that they need. One call for each stage, with plain
    values: it is read from the syntax tree and does nothing when it runs."""
