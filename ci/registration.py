"""A runner is registered for as long as it is wanted, and no longer: what is registered is removed again, also after a
crash of this process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import msgspec
import psutil

from ci.github import GitHub, GitHubError, JitRequest, JitRunner, Scope
from ci.leftovers import end, marked

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked this process to end."""


@dataclass(slots=True)
class Stop:
    """The first signal raises `Stopped` where the process is, later ones do nothing. While `held`, none does."""

    signal: int = 0
    held: bool = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if not self.signal:
            self.signal = number
            if not self.held:
                self.held = True
                raise Stopped

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = {number: signal.signal(number, self) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Record(msgspec.Struct, kw_only=True):
    """What is on disk while a runner may be registered for `scope`. `pid` and `started` (seconds since the epoch) are
    those of its program, zero before it starts."""

    name: str
    scope: str
    pid: int = 0
    started: float = 0.0


@dataclass(frozen=True, slots=True)
class RecordFile:
    """One for each runner folder, locked by the process that uses it."""

    path: Path
    descriptor: int = field(repr=False)

    def read(self) -> Record | None:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Record)
        except msgspec.DecodeError:
            return None

    def write(self, record: Record) -> None:
        written = os.pwrite(self.descriptor, msgspec.json.encode(record), 0)
        os.ftruncate(self.descriptor, written)
        os.fsync(self.descriptor)

    def clear(self) -> None:
        os.ftruncate(self.descriptor, 0)


@contextmanager
def record_of(runner_dir: Path) -> Iterator[RecordFile]:
    """Not inside `runner_dir`, where a job may write. Raises ValueError while another process uses that folder."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "draftproof"
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = state / f"runner-{hashlib.sha256(os.fsencode(runner_dir)).hexdigest()[:16]}.json"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(descriptor, runner_dir)
        yield RecordFile(path, descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, runner_dir: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"--runner-dir {runner_dir}: another runner uses it; give each a folder of its own") from error


def recover(github: GitHub, scope: Scope, file: RecordFile, tell: Callable[[str], None]) -> None:
    """Clean up after a process that was killed. Raises ValueError while its runner still works."""
    record = file.read()
    if record is None:
        return
    if _is_running(record):
        raise ValueError(
            f"runner {record.name} of an earlier start still runs as process {record.pid}; wait for its job, or end it"
        )
    for process in end(marked(record.name)):
        tell(f"process {process.pid} of runner {record.name} could not be ended")
    if record.scope != str(scope):
        tell(f"runner {record.name} may still be registered for the {record.scope}; GitHub removes it after a day")
    found = github.find_runner(scope, record.name)
    if found is not None and github.remove_runner(scope, found.id):
        tell(f"runner {record.name}, left over from a start that was cut off, has been removed")
    file.clear()


def _is_running(record: Record) -> bool:
    if not record.pid:
        return False
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.started) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def registered(
    github: GitHub, scope: Scope, request: JitRequest, file: RecordFile, stop: Stop, tell: Callable[[str], None]
) -> Iterator[JitRunner]:
    """A registered runner, removed at the end whatever happens; no signal cuts that off. Raises GitHubError."""
    if github.find_runner(scope, request.name) is not None:
        raise GitHubError(
            f"a runner named {request.name} is registered for the {scope} already (409); choose another --name, or "
            "remove the old runner",
            status=409,
        )
    file.write(Record(name=request.name, scope=str(scope)))
    runner: JitRunner | None = None
    try:
        runner = github.generate_jit_configuration(scope, request)
        yield runner
    except GitHubError as error:
        if runner is None and not error.ambiguous:
            file.clear()
            raise
        _remove(github, scope, request.name, runner, file, stop, tell)
        raise
    except BaseException:
        _remove(github, scope, request.name, runner, file, stop, tell)
        raise
    else:
        _remove(github, scope, request.name, runner, file, stop, tell)


def _remove(
    github: GitHub,
    scope: Scope,
    name: str,
    runner: JitRunner | None,
    file: RecordFile,
    stop: Stop,
    tell: Callable[[str], None],
) -> None:
    """By its name where no answer gave its id: the name was free before the request."""
    stop.held = True
    try:
        found = runner or github.find_runner(scope, name)
        if found is not None and github.remove_runner(scope, found.id):
            tell(f"runner {name} was still registered and has been removed")
        file.clear()
    except GitHubError as error:
        tell(
            f"runner {name} may still be registered: {error}. The next start in this folder removes it; GitHub does so "
            "after a day"
        )
