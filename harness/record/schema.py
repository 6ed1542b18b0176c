"""The form of a recorded run: `trace.jsonl`, one JSON object a line, and `tensors.safetensors` beside it.

Every line has its number and its kind; what it says is an object of the contract as msgspec writes dataclasses. The
order is: header, requests, actions, steps, completions, end. A tensor is a reference to a storage, with where in it the
tensor lies, so that tensors which shared memory share it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.contract import Action, Capabilities, Completion, EngineSetup, Request, SpecCounters, StepTrace

FORMAT = "draftproof-trace"
VERSION = 1
TRACE, TENSORS = "trace.jsonl", "tensors.safetensors"


class BadTrace(ValueError):
    """A file that is no trace, or not a whole one. The message names the file, the line and what is wrong with it."""


class NotRecorded(OSError):
    """A run that could not be written. It says nothing about the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line. `scripted`: the drafter was a script, which no file can hold."""

    format: str
    version: int
    setup: EngineSetup
    capabilities: Capabilities
    scripted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last line: what there must have been, so that a file that was cut is known to be."""

    num_requests: int
    num_actions: int
    num_steps: int
    num_completions: int
    idle: bool
    counters: SpecCounters | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """`n` counts lines from 0; `kind` is a key of `KINDS`."""

    n: int
    kind: str
    value: Any


KINDS: dict[str, type] = {
    "header": Header,
    "request": Request,
    "action": Action,
    "step": StepTrace,
    "completion": Completion,
    "end": End,
}
"""In the order in which they come."""
