"""The worker's end of the pipe. Standard library only (and safetensors where tensors are sent): a worker runs in the
engine's own environment and sees nothing of ours but this folder.

A frame is two big-endian uint64, the lengths of a JSON text and of safetensors bytes, and then these. The first message
is the worker's hello; from then on each request gets one reply, `{"reply": kind, ...}`: "ready", "refused" (`reason`),
"done", "failed" (`error`, `trace`). Values are objects of the harness's contract, field by field; a tensor is
`{"storage", "shape", "stride", "offset"}` in elements of a flat entry of the safetensors bytes.
"""

from __future__ import annotations

import json
import os
import struct
import traceback
from typing import Any, Protocol

VERSION = 1
_HEAD = struct.Struct(">QQ")


class Refused(Exception):
    """The engine declines what was asked, and says why."""


class ServedEngine(Protocol):
    """What a worker implements. Each may raise `Refused`."""

    def start(self, setup: dict[str, Any]) -> dict[str, Any]:
        """Start on an `EngineSetup` -> `Capabilities`."""
        ...

    def run(self, order: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
        """Run `order["requests"]` with `order["actions"]`, at most `order["max_steps"]` -> completions and what else
        of `Run` is known."""
        ...

    def stop(self) -> None:
        """Let the engine go; there may be none."""
        ...


class Tensors:
    """Collects the tensors of one reply."""

    def __init__(self) -> None:
        self.flat: dict[str, Any] = {}

    def __call__(self, tensor: Any) -> dict[str, Any]:
        """What stands for a tensor in the reply. A copy: nothing of the engine is kept."""
        name = f"s{len(self.flat)}"
        tensor = tensor.detach().cpu().contiguous()
        self.flat[name] = tensor.reshape(-1).clone()
        stride = list(tensor.stride())
        return {"storage": name, "shape": list(tensor.shape), "stride": stride, "offset": 0}

    def pack(self) -> bytes:
        if not self.flat:
            return b""
        from safetensors.torch import save

        packed: bytes = save(self.flat)
        return packed


class Wire:
    """Frames over two file descriptors."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._in = os.fdopen(read_fd, "rb", buffering=0)
        self._out = os.fdopen(write_fd, "wb", buffering=0)

    def receive(self) -> Any:
        """The next request, or None when the harness has gone."""
        head = self._exactly(_HEAD.size)
        if head is None:
            return None
        text, _ = _HEAD.unpack(head)
        body = self._exactly(text)
        return None if body is None else json.loads(body)

    def send(self, message: dict[str, Any], tensors: bytes = b"") -> None:
        text = json.dumps(_with_words(message)).encode()
        self._write(_HEAD.pack(len(text), len(tensors)))
        self._write(text)
        self._write(tensors)

    def _exactly(self, size: int) -> bytes | None:
        parts = []
        while size:
            part = self._in.read(size)
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._out.write(view) :]


def _with_words(value: Any) -> Any:
    """Infinities and NaN as words: JSON has no numbers for them."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {name: _with_words(inner) for name, inner in value.items()}
    return [_with_words(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def serve(engine: ServedEngine, hello: dict[str, Any]) -> None:
    """Answer requests until the harness goes. `hello` tells the engine's name and version."""
    wire = Wire(int(os.environ["DRAFTPROOF_READ"]), int(os.environ["DRAFTPROOF_WRITE"]))
    wire.send({"hello": VERSION, **hello})
    while True:
        message = wire.receive()
        if message is None:
            break
        wire.send(*_answer(engine, message))
    engine.stop()


def _answer(engine: ServedEngine, message: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    tensors = Tensors()
    reply: dict[str, Any]
    try:
        if message["ask"] == "start":
            reply = {"reply": "ready", "capabilities": engine.start(message["setup"])}
        elif message["ask"] == "run":
            reply = {"reply": "done", "run": engine.run(message, tensors)}
        else:
            engine.stop()
            reply = {"reply": "done", "run": {}}
    except Refused as refusal:
        reply = {"reply": "refused", "reason": str(refusal)}
    except Exception as error:
        reply = {"reply": "failed", "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return reply, tensors.pack()
