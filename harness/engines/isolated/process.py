"""A worker process: started, asked with a deadline, and told apart when it dies, hangs, floods or talks nonsense."""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import msgspec

WIRE_VERSION = 1
_HEAD = struct.Struct(">QQ")
LARGEST = 1 << 31
"""Bytes of one message: a length beyond it is nonsense."""
KEPT = 64 * 1024
"""Bytes of a worker's output that are kept, its last."""
SHOWN = 30
"""Lines of it that are told when something is wrong."""


class EngineFailure(RuntimeError):
    """The engine crashed, hung, was killed or answered nonsense. The message says which, with the last lines that it
    wrote."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds for the worker's first word, for a start, for a run, and for its end when it is told to go."""

    hello: float = 120.0
    start: float = 300.0
    run: float = 120.0
    end: float = 5.0


class _Log:
    """The end of what a process writes, read as it comes, so that a flood neither blocks it nor fills a disk."""

    def __init__(self, stream: BinaryIO) -> None:
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._drain, args=(stream,), daemon=True)
        self._thread.start()

    def _drain(self, stream: BinaryIO) -> None:
        with stream:
            while part := os.read(stream.fileno(), 1 << 16):
                with self._lock:
                    self._kept += part
                    del self._kept[:-KEPT]

    def tail(self, wait: float = 0.5) -> str:
        """The last lines; waits a moment for what a dying process has still written."""
        self._thread.join(wait)
        with self._lock:
            lines = self._kept.decode("utf-8", "replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-SHOWN:]) or "  | (it wrote nothing)"


class Life(Protocol):
    """What is known of a process."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """The same, when it is over. Raises subprocess.TimeoutExpired."""
        ...


class Worker:
    """A process of its own session, and two pipes to it. Its standard streams are its log, which is read from `log`.
    `in_` and `out` are our ends of the pipes. It must say hello at once."""

    def __init__(self, life: Life, in_: int, out: int, log: BinaryIO, deadlines: Deadlines) -> None:
        self.deadlines = deadlines
        self._life, self._in, self._out = life, in_, out
        self._log = _Log(log)
        os.set_blocking(self._in, False)
        self.hello = self._receive(deadlines.hello, "say hello")[0]
        if self.hello.get("hello") != WIRE_VERSION:
            raise self._failure(f"speaks version {self.hello.get('hello')!r} of the protocol, not {WIRE_VERSION}")

    @property
    def pid(self) -> int:
        return self._life.pid

    @property
    def alive(self) -> bool:
        return self._life.poll() is None

    def ask(self, message: Mapping[str, Any], deadline: float) -> tuple[dict[str, Any], bytes]:
        """Send a message and wait for its reply: a JSON object and safetensors bytes. Raises `EngineFailure`, after
        which the process is gone."""
        what = str(message["ask"])
        text = msgspec.json.encode(message)
        try:
            self._send(_HEAD.pack(len(text), 0) + text)
        except OSError as error:
            raise self._failure(f"{self._death()} before it could {what}") from error
        return self._receive(deadline, what)

    def close(self) -> None:
        """End the process and its children, kindly at first."""
        for number in (self._in, self._out):
            if number >= 0:
                os.close(number)
        self._in = self._out = -1
        for sign, patience in ((signal.SIGTERM, self.deadlines.end), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self._life.pid, sign)
            except ProcessLookupError:
                break
            try:
                self._life.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        self._life.wait()

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._out, view) :]

    def _receive(self, deadline: float, what: str) -> tuple[dict[str, Any], bytes]:
        until = time.monotonic() + deadline
        text, tensors = _HEAD.unpack(self._exactly(_HEAD.size, until, deadline, what))
        if text + tensors > LARGEST:
            raise self._failure(f"answered nonsense when asked to {what}: a message of {text + tensors} bytes")
        body = self._exactly(text, until, deadline, what)
        packed = self._exactly(tensors, until, deadline, what)
        try:
            return msgspec.json.decode(body, type=dict[str, Any]), packed
        except msgspec.MsgspecError as error:
            raise self._failure(f"answered nonsense when asked to {what}: {error}") from error

    def _exactly(self, size: int, until: float, deadline: float, what: str) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise self._failure(f"did not {what} within {deadline:g} s: it hangs, or needs a longer deadline")
            part = os.read(self._in, min(size - len(parts), 1 << 20))
            if not part:
                raise self._failure(f"{self._death()} when asked to {what}")
            parts += part
        return bytes(parts)

    def _death(self) -> str:
        """How the process ended, in words."""
        try:
            code = self._life.wait(2.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe without an answer"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        killed = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"was ended by {name}{killed}"

    def _failure(self, what: str) -> EngineFailure:
        log = self._log.tail()
        self.close()
        return EngineFailure(f"the engine {what}\nits last lines:\n{log}")
