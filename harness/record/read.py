"""Read a run that was recorded, here or by another program. Nothing in the file is trusted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness.contract import Run
from harness.record.schema import FORMAT, KINDS, TENSORS, TRACE, VERSION, BadTrace, End, Line
from harness.record.values import Packed, decoded


def read(folder: Path) -> Run:
    """The run in a folder. Raises `BadTrace` for what is not a trace, not a whole one, or out of order."""
    path = folder / TRACE
    if not path.is_file():
        raise BadTrace(f"{path}: there is no such file; a trace is a folder with {TRACE} and {TENSORS}")
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for kind, value in _lines(path, _tensors(folder / TENSORS)):
        found[kind].append(value)
    header, end = found["header"][0], _end(path, found)
    return Run(
        setup=header.setup,
        capabilities=header.capabilities,
        requests=tuple(found["request"]),
        completions=tuple(found["completion"]),
        steps=tuple(found["step"]),
        counters=end.counters,
        actions=tuple(found["action"]),
        idle=end.idle,
    )


def _tensors(path: Path) -> Packed:
    try:
        return Packed(path.read_bytes() if path.exists() else b"", str(path))
    except ValueError as error:
        raise BadTrace(str(error)) from error


def _lines(path: Path, tensors: Packed) -> Iterator[tuple[str, Any]]:
    order, last = list(KINDS), 0
    for number, raw in enumerate(path.read_bytes().splitlines()):
        where = f"{path}, line {number + 1}"
        try:
            line = msgspec.json.decode(raw, type=Line)
        except msgspec.MsgspecError as error:
            raise BadTrace(f"{where}: {_first(number, error)}") from error
        if number == 0:
            _require_header(where, line)
        if line.kind not in KINDS:
            raise BadTrace(f"{where}: kind {line.kind!r} must be one of {', '.join(KINDS)}")
        if line.n != number:
            raise BadTrace(f"{where}: this is line {line.n} of the trace; lines are missing or out of order")
        if order.index(line.kind) < last:
            raise BadTrace(f"{where}: a {line.kind} comes after a {order[last]}; the order is {', '.join(order)}")
        last = order.index(line.kind)
        try:
            yield line.kind, decoded(line.value, KINDS[line.kind], tensors)
        except ValueError as error:
            raise BadTrace(f"{where}: not a {line.kind}: {error}") from error
    if last != len(order) - 1:
        raise BadTrace(f"{path}: the end is missing; the file was cut, or is still being written")


def _first(number: int, error: Exception) -> str:
    if number == 0:
        return f"this is no {FORMAT} ({error})"
    return f"not a whole line of JSON ({error}); the file was cut, or something else wrote into it"


def _require_header(where: str, line: Line) -> None:
    head = line.value if isinstance(line.value, dict) else {}
    if line.kind != "header" or head.get("format") != FORMAT:
        raise BadTrace(f"{where}: this is no {FORMAT}; the first line must be its header")
    if head.get("version") != VERSION:
        raise BadTrace(f"{where}: version {head.get('version')!r}; this Draftproof reads version {VERSION}")


def _end(path: Path, found: dict[str, list[Any]]) -> End:
    ends, headers = found["end"], found["header"]
    if len(ends) != 1 or len(headers) != 1:
        raise BadTrace(f"{path}: {len(headers)} headers and {len(ends)} ends; there must be one of each")
    end: End = ends[0]
    for kind, count in (
        ("request", end.num_requests),
        ("action", end.num_actions),
        ("step", end.num_steps),
        ("completion", end.num_completions),
    ):
        if len(found[kind]) != count:
            raise BadTrace(f"{path}: the end tells of {count} {kind}s and there are {len(found[kind])}")
    steps = [step.step for step in found["step"]]
    if steps != sorted(set(steps)):
        raise BadTrace(f"{path}: steps must be numbered upwards, each once")
    return end
