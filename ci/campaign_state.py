"""What a campaign has done and found, in one file that survives this process; and what one failure looks like."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

VERSION = 1


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One failing test of one run. `example` is the smallest input that hypothesis found, without what differs from run
    to run or from lane to lane; `decorator` brings it back in any checkout with that version of hypothesis."""

    engine: str
    invariants: tuple[str, ...]
    drafter: str
    test: str
    message: str
    seed: int
    example: str = ""
    decorator: str = ""
    reproduce: str = ""

    @property
    def key(self) -> str:
        """The same for every run that found the same: invariant and smallest input, or what was said without one."""
        said = self.example or self.message.partition("\n")[0]
        parts = (self.engine, self.invariants, self.test, said)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


class Finding(msgspec.Struct, kw_only=True):
    """Failures of one key: the first of them, and the seeds and lanes on which it was seen."""

    first: Failure
    seeds: list[int]
    drafters: list[str]


class Task(msgspec.Struct, kw_only=True):
    """One seed on one engine. `broken`: it could not be done, and `note` says why; it is done again by the next start.
    `seconds` of its last attempt."""

    engine: str
    seed: int
    status: Literal["passed", "failed", "broken"]
    attempts: int
    examples: int = 0
    seconds: float = 0.0
    note: str = ""

    @property
    def key(self) -> str:
        return task_key(self.engine, self.seed)


def task_key(engine: str, seed: int) -> str:
    return f"{engine} {seed}"


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What a seed runs; a campaign keeps to one. Engines and seeds may be added."""

    suites: tuple[str, ...]
    drafters: tuple[str, ...]
    invariants: tuple[str, ...]
    tier: str


class Campaign(msgspec.Struct, kw_only=True):
    scope: Scope
    tasks: dict[str, Task] = {}
    findings: dict[str, Finding] = {}
    version: int = VERSION

    def add(self, failure: Failure) -> bool:
        """Whether nothing like it was known."""
        known = self.findings.get(failure.key)
        finding = known or Finding(first=failure, seeds=[], drafters=[])
        finding.seeds = sorted({*finding.seeds, failure.seed})
        finding.drafters = sorted({*finding.drafters, failure.drafter})
        self.findings[failure.key] = finding
        return known is None

    def missing(self, engines: Sequence[str], seeds: range) -> list[tuple[str, int]]:
        """What is not done yet: seed by seed, so that every engine is seen early."""
        done = {key for key, task in self.tasks.items() if task.status != "broken"}
        return [(engine, seed) for seed in seeds for engine in engines if task_key(engine, seed) not in done]


@contextmanager
def opened(folder: Path, scope: Scope) -> Iterator[Campaign]:
    """The campaign in `folder`, new or as it was left; no other process may have it. Raises ValueError when it is of
    another scope, or unreadable."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--out {folder}: another campaign runs there; wait for it, or choose another") from error
        yield _read(folder / "campaign.json", scope)


def _read(path: Path, scope: Scope) -> Campaign:
    if not path.exists():
        return Campaign(scope=scope)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Campaign)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}; move it away to begin anew") from error
    if found.version != VERSION:
        raise ValueError(f"{path}: version={found.version}: must be {VERSION}; move it away to begin anew")
    for field in Scope.__struct_fields__:
        if getattr(found.scope, field) != getattr(scope, field):
            old, new = getattr(found.scope, field), getattr(scope, field)
            raise ValueError(f"{path}: was begun with {field}={old}, not {new}; choose another --out for that")
    return found


def write(folder: Path, campaign: Campaign) -> None:
    """All or nothing, and on the disk when this returns."""
    part = folder / "campaign.json.part"
    with part.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(campaign), indent=1))
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / "campaign.json")


def append(path: Path, failure: Failure) -> None:
    """On the disk when this returns."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(failure) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_failures(path: Path) -> list[Failure]:
    """Of a process that may have died while it wrote: its last line may be half a one."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(msgspec.json.decode(line, type=Failure))
        except (msgspec.DecodeError, msgspec.ValidationError):
            continue
    return found
