"""The worker's end of the pipe. Standard library only (and safetensors where tensors are sent): a worker runs in the
engine's own environment and sees nothing of ours but this folder.

A frame is two big-endian uint64, the lengths of a JSON text and of safetensors bytes, and then these. The first message
is the worker's hello; from then on each request gets one reply, `{"reply": kind, ...}`: "ready" (`facts`), "refused"
(`reason`), "done", "failed" (`error`, `trace`). The process that is started first starts no engine: it forks one that
does for each that is wanted ("fork", over three FIFOs), and tells how they end ("poll").

What is asked is in the engine's own words, put so by its adapter. What is answered are objects of the harness's
contract, field by field; a tensor is `{"storage", "shape", "stride", "offset"}` in elements of a flat entry of the
safetensors bytes.
"""

from __future__ import annotations

import gc
import json
import os
import struct
import sys
import traceback
from pathlib import Path
from typing import Any, Protocol

VERSION = 1
_HEAD = struct.Struct(">QQ")


class Refused(Exception):
    """The engine declines what was asked, and says why."""


OURS = "Draftproof"
"""What the names of architectures begin with that no public engine has."""


def refuse_ours(model: str) -> None:
    """Raises `Refused` for a checkpoint of such an architecture: an engine takes half a minute to find that out."""
    path = Path(model) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name in config.get("architectures", ()):
        if name.startswith(OURS):
            raise Refused(f"architectures={name}: an architecture of Draftproof's own")


def renamed(model: Path, names: dict[str, str]) -> str:
    """A checkpoint under the architecture that an engine knows it by, of which `names` has ours: a folder of links
    beside the worker. One of another architecture stays where it is."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    known = [names.get(name, name) for name in config.get("architectures", ())]
    if known == config.get("architectures", []):
        return str(model)
    folder = Path.cwd() / f"renamed-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        if file.name != "config.json" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": known}), encoding="utf-8")
    return str(folder)


class ServedEngine(Protocol):
    """What a worker implements. Each may raise `Refused`."""

    def load(self) -> None:
        """Import what every engine needs: once, before the first fork."""
        ...

    def start(self, words: dict[str, Any]) -> dict[str, Any]:
        """Start it -> what is worth knowing of it."""
        ...

    def run(self, order: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
        """Run `order["requests"]` with `order["actions"]`, at most `order["max_steps"]` -> completions and what else
        of `Run` is known."""
        ...

    def reset(self) -> None:
        """Empty its caches: the next one who uses it must not see what came before."""
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

    def close(self) -> None:
        self._in.close()
        self._out.close()

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
    leave_ours_out()
    hello = {"hello": VERSION, **hello}
    wire = Wire(int(os.environ["DRAFTPROOF_READ"]), int(os.environ["DRAFTPROOF_WRITE"]))
    wire.send(hello)
    while True:
        message = wire.receive()
        if message is None:
            break
        if message["ask"] == "fork":
            wire = _fork(engine, wire, message, hello)
        else:
            wire.send(*_answer(engine, message))
    engine.stop()


def leave_ours_out() -> None:
    """Where the engine's environment has Draftproof as well, its packages are taken off the path: `kernels` is a public
    package's name, too."""
    sys.meta_path[:] = [one for one in sys.meta_path if "draftproof" not in getattr(one, "__module__", "")]
    sys.path[:] = [entry for entry in sys.path if not (Path(entry) / "harness" / "engines" / "workers").is_dir()]


def _fork(engine: ServedEngine, wire: Wire, message: dict[str, Any], hello: dict[str, Any]) -> Wire:
    """The wire on which the process goes on: in the server its own, in the child a new one."""
    try:
        engine.load()
        # What has been imported is nobody's garbage: a child would spend a second looking through it, again and again.
        gc.collect()
        gc.freeze()
    except Exception as error:
        wire.send({"reply": "failed", "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
        return wire
    ends = [
        os.open(message["orders"], os.O_RDONLY),
        os.open(message["replies"], os.O_WRONLY),
        os.open(message["log"], os.O_WRONLY),
    ]
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        for end in ends:
            os.close(end)
        wire.send({"reply": "done", "pid": pid})
        return wire
    os.setsid()
    wire.close()
    for stream in (1, 2):
        os.dup2(ends[2], stream)
    os.close(ends[2])
    wire = Wire(ends[0], ends[1])
    wire.send(hello)
    return wire


def _poll(pid: int) -> int | None:
    """Exit code of a child that has ended, negative for a signal."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _answer(engine: ServedEngine, message: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    tensors = Tensors()
    reply: dict[str, Any]
    try:
        if message["ask"] == "start":
            reply = {"reply": "ready", "facts": engine.start(message["words"])}
        elif message["ask"] == "run":
            reply = {"reply": "done", "run": engine.run(message, tensors)}
        elif message["ask"] == "poll":
            reply = {"reply": "done", "code": _poll(message["pid"])}
        elif message["ask"] == "reset":
            engine.reset()
            reply = {"reply": "done"}
        else:
            reply = {"reply": "failed", "error": f"unknown request {message['ask']!r}", "trace": ""}
    except Refused as refusal:
        reply = {"reply": "refused", "reason": str(refusal)}
    except Exception as error:
        reply = {"reply": "failed", "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return reply, tensors.pack()
