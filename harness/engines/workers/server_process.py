"""A server that is started for one engine and ends with it. It stays in the worker's process group, so that who ends
the worker ends the server; on Linux it ends, too, with a worker that is killed alone."""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from http_json import HttpError, NoAnswer, fetch
from wire import Refused

KEPT = 400
"""Lines of its output that are kept."""
SHOWN = 20
"""Lines of them that an error shows."""
GLANCE = 5.0
"""Seconds that a server may think about whether it is well."""
PAUSE = 0.02
"""Seconds between two questions whether it is up."""
PR_SET_PDEATHSIG = 1
PLACE = re.compile(r"\{([a-z_]+)\}")


Ended = Callable[[int, list[str]], Exception | None]


class ServerFailure(RuntimeError):
    """The server does not come up, ends, hangs, breaks or answers nonsense. The message says which, with its last
    lines."""


def filled(template: Sequence[str], places: Mapping[str, str]) -> list[str]:
    """The arguments with each {name} that is a place replaced; other braces stay as they are."""
    return [PLACE.sub(lambda found: places.get(found[1], found[0]), part) for part in template]


def declines(refusals: Sequence[str]) -> Ended:
    """`refusals`: what begins the lines, in words of regular expressions, with which a server declines a set-up before
    it ends; the last of them is the reason."""
    wanted = re.compile("|".join(f"(?:{one})" for one in refusals)) if refusals else None

    def ended(code: int, lines: list[str]) -> Exception | None:
        found = [line[seen.start() :] for line in lines if wanted and (seen := wanted.search(line))]
        refusal: Exception | None = Refused(found[-1]) if code > 0 and found else None
        return refusal

    return ended


class ServerProcess:
    """`template` is a command with places; {port} is one that nobody else has. `ended`: what it means, by exit code and
    last lines, that the server ends before it is up; None where that is a failure like any other."""

    def __init__(
        self,
        template: Sequence[str],
        places: Mapping[str, str],
        environment: Mapping[str, str],
        health: str,
        ended: Ended = lambda _code, _lines: None,
        patience: float = math.inf,
    ) -> None:
        port = _free_port()
        self.address = f"http://127.0.0.1:{port}"
        self._lines: deque[str] = deque(maxlen=KEPT)
        command = filled(template, {**places, "port": str(port)})
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                text=True,
                errors="replace",
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise ServerFailure(f"the server cannot be started: {error}: {' '.join(command)}") from error
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        self._wait(health, ended, patience)

    def _read(self, output: IO[str]) -> None:
        """Keep the last lines, and say all of them again: the worker's output is the log that the harness shows."""
        for line in output:
            self._lines.append(line.rstrip())
            sys.stdout.write(line)
            sys.stdout.flush()

    def _wait(self, health: str, ended: Ended, patience: float) -> None:
        """Until it is well. Raises what `ended` says or `ServerFailure`, after which it is gone."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            code = self._process.poll()
            if code is not None:
                self._reader.join(1.0)
                raise ended(code, list(self._lines)) or ServerFailure(f"{self.death()} before it was up\n{self.tail()}")
            try:
                fetch(self.address, "GET", health, None, GLANCE)
                return
            except (NoAnswer, HttpError):
                time.sleep(PAUSE)
        said = self.tail()
        self.stop()
        raise ServerFailure(f"the server was not well within {patience:g} s: no good answer to GET {health}\n{said}")

    def exit_code(self, patience: float = 0.0) -> int | None:
        """None while it lives, for so many seconds more at least; the negative of the signal that ended it."""
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return None

    def death(self, patience: float = 0.0) -> str:
        """How it ended, in words; empty while it lives, for so many seconds more at least."""
        code = self.exit_code(patience)
        if code is None:
            return ""
        return f"the server ended with exit code {code}" if code >= 0 else f"the server was ended by signal {-code}"

    def tail(self) -> str:
        """Its last lines."""
        self._reader.join(0.3)
        lines = list(self._lines)[-SHOWN:]
        return "its last lines:\n" + ("\n".join(f"  | {line}" for line in lines) or "  | (it wrote nothing)")

    def stop(self) -> None:
        for end in (self._process.terminate, self._process.kill):
            end()
            try:
                self._process.wait(5.0)
                return
            except subprocess.TimeoutExpired:
                continue


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
