"""Write a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from harness.contract import EngineSetup, Run
from harness.record.schema import FORMAT, TENSORS, TRACE, VERSION, End, Header, Line, View


class _Storages:
    """Every storage once, under a name; tensors become views of them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[int, str], str] = {}

    def view(self, tensor: torch.Tensor) -> View:
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), str(tensor.dtype)
        name = self._names.get(key) if storage.nbytes() else None
        if name is None:
            name = self._names[key] = f"s{len(self.tensors)}"
            size = storage.nbytes() // tensor.element_size()
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (size,), (1,))
            self.tensors[name] = whole.detach().cpu().clone()
        return View(name, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def write(run: Run, folder: Path) -> Path:
    """Write a run into `folder`, which must not hold one. Returns the folder. The tensors of a run are all alive, so
    that equal addresses mean shared memory."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / TRACE).exists():
        raise ValueError(f"{folder / TRACE}: there is a trace already; write each run into a folder of its own")
    storages = _Storages()

    def plain(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return asdict(storages.view(value))
        if isinstance(value, Path):
            return str(value)
        raise NotImplementedError(f"{type(value).__name__} has no place in a trace")

    with (folder / TRACE).open("wb") as file:
        for n, (kind, value) in enumerate(_said(run)):
            said = _with_words(msgspec.to_builtins(value, enc_hook=plain))
            file.write(msgspec.json.encode(Line(n, kind, said)) + b"\n")
    save_file(storages.tensors, str(folder / TENSORS))
    return folder


def _with_words(value: Any) -> Any:
    """Infinities and NaN as words: JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _with_words(inner) for name, inner in value.items()}
    return [_with_words(inner) for inner in value] if isinstance(value, list | tuple) else value


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
    counts = (len(values) for values in (run.requests, run.actions, run.steps, run.completions))
    requests, actions, steps, completions = counts
    yield (
        "end",
        End(
            num_requests=requests,
            num_actions=actions,
            num_steps=steps,
            num_completions=completions,
            idle=run.idle,
            counters=run.counters,
        ),
    )


def _without_script(setup: EngineSetup) -> tuple[EngineSetup, bool]:
    if setup.drafter is None or setup.drafter.script is None:
        return setup, False
    return replace(setup, drafter=replace(setup.drafter, script=None)), True
