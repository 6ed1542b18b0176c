"""Commands on Ray's workers. A worker that dies gives its command back."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STORE_BYTES = 100 * 2**20
"""Of Ray's object store, through which next to nothing goes; it takes no less than 75 MiB."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's servers listen on 127.0.0.1 alone, on Linux, too."""
WORKER_PID = "{worker_pid}"
"""In a command: replaced by the process id of the worker."""


@dataclass(frozen=True, slots=True)
class Order:
    """A command, its folder and what it has in its environment beside that of the worker; what it says goes to
    `output`. It is cut off after `seconds`."""

    command: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    output: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """`code` is the exit code, minus the signal that ended it, or None: `lost` then says what its worker died of."""

    code: int | None
    lost: str = ""


class Workers:
    """`address` of a cluster, or empty: Ray is started on this machine, with nothing that the network sees."""

    def __init__(self, ray: Any, gpus: float) -> None:
        self._ray = ray
        # Lost orders are counted and told by whoever gave them.
        self._run = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(run)
        self._given: dict[Any, str] = {}

    def __len__(self) -> int:
        return len(self._given)

    def give(self, name: str, order: Order) -> None:
        ref = self._run.remote(order.command, order.folder, dict(order.environment), order.output, order.seconds)
        self._given[ref] = name

    def answers(self) -> Iterator[tuple[str, Answer]]:
        """Wait for the next ones."""
        done, _ = self._ray.wait(list(self._given), num_returns=1)
        for ref in done:
            name = self._given.pop(ref)
            try:
                yield name, Answer(self._ray.get(ref))
            except self._ray.exceptions.RayError as error:
                yield name, Answer(None, str(error).strip().partition("\n")[0] or type(error).__name__)


@contextmanager
def started(count: int, address: str, gpus: float) -> Iterator[Workers]:
    """Raises ValueError without Ray, or when there is no cluster at `address`."""
    with tempfile.TemporaryDirectory(prefix="draftproof-", ignore_cleanup_errors=True) as folder:
        # Ray reads them when it is imported.
        os.environ |= _variables(address, Path(folder))
        try:
            import ray
        except ImportError as error:
            raise ValueError("a campaign needs Ray, which is not installed: make install") from error
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if not address:
            options |= {"num_cpus": count, "include_dashboard": False, "object_store_memory": STORE_BYTES}
            options |= {"_temp_dir": folder}
        _init(ray, address, options)
        try:
            yield Workers(ray, gpus)
        finally:
            ray.shutdown()


def _variables(address: str, folder: Path) -> dict[str, str]:
    if not address:
        return {**QUIET, **LOOPBACK, **_own_token(folder)}
    near = LOOPBACK if _is_loopback(address) else {}
    # Without being told, Ray does not use the token that it has.
    mode = {"RAY_AUTH_MODE": "token"} if "RAY_AUTH_MODE" not in os.environ and _has_token() else {}
    return {**QUIET, **near, **mode}


def _own_token(folder: Path) -> dict[str, str]:
    """Other users of this machine reach its loopback, too. Ray's own file of a token is for everybody to read."""
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32), encoding="ascii")
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def _has_token() -> bool:
    """Whether the token of a cluster is where Ray looks for it."""
    named = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return named or (Path.home() / ".ray" / "auth_token").exists()


def _is_loopback(address: str) -> bool:
    """Whether a cluster at HOST:PORT is one of this machine's loopback. Raises ValueError when nothing listens there:
    Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10.0) as connection:
            return ipaddress.ip_address(connection.getpeername()[0]).is_loopback
    except OSError as error:
        raise ValueError(f"--address {address}: {error}; start a cluster there with `ray start --head`") from error


def _init(ray: Any, address: str, options: dict[str, Any]) -> None:
    try:
        ray.init(address=address or "local", **options)
    except (ConnectionError, ValueError) as error:
        raise ValueError(f"--address {address}: {error}; start a cluster there with `ray start --head`") from error


def run(command: Sequence[str], folder: str, environment: dict[str, str], output: str, seconds: float) -> int:
    """What a worker does: the exit code. Takes and gives plain values only."""
    pid = str(os.getpid())
    words = [pid if word == WORKER_PID else word for word in command]
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    with Path(output).open("wb") as file:
        try:
            return subprocess.run(
                words,
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            file.write(f"\ncut off after {seconds:g} s\n".encode())
            return -9
