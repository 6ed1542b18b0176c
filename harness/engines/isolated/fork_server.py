"""Where workers come from. To import an engine takes seconds, so one process does it once and forks a copy of itself
for each engine that is started."""

from __future__ import annotations

import io
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from harness.engines.isolated.process import Deadlines, EngineFailure, Worker

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
"""What a worker gets of our environment: never our module path, and no token."""
POLL = 0.02
"""Seconds between two looks at a process that is to end."""


class ForkServer:
    """`python` running `script`, a worker file. Raises `EngineFailure` when it does not come up."""

    def __init__(
        self,
        python: Path,
        script: Path,
        deadlines: Deadlines,
        environment: Mapping[str, str] | None = None,
        inherit: Sequence[str] = (),
    ) -> None:
        self._deadlines = deadlines
        self._folder = tempfile.TemporaryDirectory(prefix="draftproof-worker-", ignore_cleanup_errors=True)
        self._forks = 0
        theirs_in, out = os.pipe()
        in_, theirs_out = os.pipe()
        env = {name: os.environ[name] for name in (*INHERITED, *inherit) if name in os.environ}
        env |= {"DRAFTPROOF_READ": str(theirs_in), "DRAFTPROOF_WRITE": str(theirs_out), "PYTHONUNBUFFERED": "1"}
        try:
            process = subprocess.Popen(
                [str(python), "-s", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs_in, theirs_out),
                cwd=self._folder.name,
                env=env | dict(environment or {}),
                start_new_session=True,
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._worker = Worker(process, in_, out, cast(BinaryIO, process.stdout), deadlines)

    @property
    def alive(self) -> bool:
        return self._worker.alive

    @property
    def version(self) -> str:
        """The engine's, as the worker file tells it."""
        return str(self._worker.hello.get("version", ""))

    def fork(self) -> Worker:
        """A process with the engine imported and nothing started. Raises `EngineFailure`, after which the server is
        gone."""
        self._forks += 1
        ends = {name: f"{self._folder.name}/{self._forks}.{name}" for name in ("orders", "replies", "log")}
        for path in ends.values():
            os.mkfifo(path, 0o600)
        # Ends for reading open at once when they do not block; a FIFO that is open for both has a reader and a writer.
        replies, log = (os.open(ends[name], os.O_RDONLY | os.O_NONBLOCK) for name in ("replies", "log"))
        both = os.open(ends["orders"], os.O_RDWR)
        try:
            reply, _ = self._worker.ask({"ask": "fork", **ends}, self._deadlines.start)
            if not isinstance(reply.get("pid"), int):
                raise EngineFailure(f"the engine could not be imported: {reply.get('error')}\n{reply.get('trace', '')}")
            orders = os.open(ends["orders"], os.O_WRONLY)
        except BaseException:
            os.close(replies)
            os.close(log)
            raise
        finally:
            os.close(both)
            for path in ends.values():
                Path(path).unlink()
        os.set_blocking(log, True)
        stream = cast(BinaryIO, io.FileIO(log))
        return Worker(_Forked(self._worker, reply["pid"]), replies, orders, stream, self._deadlines)

    def close(self) -> None:
        self._worker.close()
        self._folder.cleanup()


class _Forked:
    """A child of the server, which is the only one to learn how it ends."""

    def __init__(self, server: Worker, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            try:
                reply, _ = self._server.ask({"ask": "poll", "pid": self.pid}, self._server.deadlines.hello)
                self._code = reply.get("code", -9)
            except EngineFailure:
                self._code = -9  # its pipes are gone with the server, and so is it
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL)
        return code
