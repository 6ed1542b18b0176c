"""Stages of checking, as `stages.toml` lists them: what runs a stage, with which options and within which time."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ci import named

FILE = Path(__file__).with_name("stages.toml")
WORKFLOWS = Path(__file__).with_name("workflows")
FILLED = 0.75
"""The part of its time limit to which a shard is planned; the rest is for machines that are slower, and for growth."""


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`minutes`: time limit of the tests in one shard. `suites_of` names the stage whose suites it runs, at `times`
    their seconds; its own where that is empty. `own_machines`: it may run on machines that are not hosted."""

    name: str
    title: str
    minutes: float
    workflow: str = ""
    options: tuple[str, ...] = ()
    suites_of: str = ""
    times: float = 1.0
    own_machines: bool = False

    @property
    def runs(self) -> bool:
        """Whether a workflow runs it."""
        return bool(self.workflow) and (WORKFLOWS / f"{self.workflow}.yml").is_file()

    @property
    def capacity(self) -> float:
        """Seconds of suites that one shard is given at most."""
        return self.minutes * 60 * FILLED


def load(path: Path = FILE) -> dict[str, Stage]:
    """The stages by name, in the order of the file. Raises ValueError naming the field that does not fit."""
    stages = named.read(path, Stage)
    for stage in stages.values():
        if stage.minutes <= 0 or stage.times <= 0:
            raise ValueError(f"{path}: {stage.name}: minutes and times must be positive")
        if stage.suites_of and stage.suites_of not in stages:
            raise ValueError(f"{path}: {stage.name}: suites_of={stage.suites_of!r}: must be one of {', '.join(stages)}")
    return stages
