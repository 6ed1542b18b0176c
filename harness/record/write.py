"""Write a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import save_file

from harness.contract import EngineSetup, Run
from harness.record.schema import FORMAT, TENSORS, TRACE, VERSION, End, Header, Line, NotRecorded
from harness.record.values import Storages, plain


def write(run: Run, folder: Path) -> Path:
    """Write a run into `folder`, which must not hold one. Returns the folder. Raises `NotRecorded`, and leaves none of
    the two files, when they cannot be written."""
    if (folder / TRACE).exists():
        raise ValueError(f"{folder / TRACE}: there is a trace already; write each run into a folder of its own")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        storages = Storages()
        with (folder / TRACE).open("wb") as file:
            for n, (kind, value) in enumerate(_said(run)):
                file.write(msgspec.json.encode(Line(n, kind, plain(value, storages))) + b"\n")
        save_file(storages.tensors, str(folder / TENSORS))
    except (OSError, SafetensorError) as error:
        for name in (TRACE, TENSORS):
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        raise NotRecorded(
            f"{folder}: the run was not recorded ({error}); make room there, or record elsewhere"
        ) from error
    return folder


def _said(run: Run) -> Iterator[tuple[str, Any]]:
    setup, scripted = _without_script(run.setup)
    yield (
        "header",
        Header(format=FORMAT, version=VERSION, setup=setup, capabilities=run.capabilities, scripted=scripted),
    )
    for kind, values in (
        ("request", run.requests),
        ("action", run.actions),
        ("step", run.steps),
        ("completion", run.completions),
    ):
        yield from ((kind, value) for value in values)
    end = End(
        num_requests=len(run.requests),
        num_actions=len(run.actions),
        num_steps=len(run.steps),
        num_completions=len(run.completions),
        idle=run.idle,
        counters=run.counters,
    )
    yield "end", end


def _without_script(setup: EngineSetup) -> tuple[EngineSetup, bool]:
    if setup.drafter is None or setup.drafter.script is None:
        return setup, False
    return replace(setup, drafter=replace(setup.drafter, script=None)), True
