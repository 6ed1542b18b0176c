"""The token of `draftproof ci register-runner`: from a file that is its owner's alone, or from the environment."""

from __future__ import annotations

import ctypes
import os
import re
import stat
import sys
from pathlib import Path

PR_SET_DUMPABLE = 4
MAX_BYTES = 4096
_TOKEN = re.compile(r"[\x21-\x7e]+")


def from_file(path: Path) -> str:
    """Raises ValueError unless it is a regular file of this user that nobody else may read or write."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"--token-file {path}: {error.strerror}; write the token there with mode 0600") from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"--token-file {path}: must be a regular file")
        if found.st_uid != os.geteuid():
            raise ValueError(
                f"--token-file {path}: belongs to user {found.st_uid}, who could change it; this is user {os.geteuid()}"
            )
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o077:
            raise ValueError(f"--token-file {path}: mode {mode:04o} lets others in; chmod 600 it")
        return _checked(file.read(MAX_BYTES + 1), f"--token-file {path}")


def from_environment(name: str) -> str:
    """Takes the token out of the environment, so that no child has it and `ps e` does not show it. Raises ValueError
    when there is none."""
    value = os.environ.pop(name, "")
    if not value:
        raise ValueError(f"there is no token: set {name}, or better give --token-file with mode 0600")
    _wipe(name)
    return _checked(os.fsencode(value), f"the variable {name}")


def _checked(raw: bytes, where: str) -> str:
    """No error shows what it held."""
    text = raw.decode("ascii", errors="replace").strip()
    if len(raw) > MAX_BYTES or not _TOKEN.fullmatch(text):
        raise ValueError(f"{where}: must hold one token in printable ASCII, and nothing else")
    return text


def _wipe(name: str) -> None:
    """Overwrite the value in the block that the kernel shows as /proc/PID/environ: removing a variable leaves it."""
    if sys.platform != "linux":
        return
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    start = int(fields[47])  # env_start, field 50 of proc_pid_stat(5); the first of `fields` is field 3
    block = Path("/proc/self/environ").read_bytes()
    begin = block.find(b"\0" + name.encode() + b"=") + 1
    if not begin and not block.startswith(name.encode() + b"="):
        return
    value = begin + len(name) + 1
    end = block.find(b"\0", value)
    ctypes.memset(start + value, 0, (len(block) if end < 0 else end) - value)


def hide_memory() -> None:
    """A job that runs as the same user may not read this process: neither its memory nor its environment."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
