"""Commands on Ray's workers. A worker that dies gives its command back."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STORE_BYTES = 100 * 2**20
"""Of Ray's object store, through which next to nothing goes; it takes no less than 75 MiB."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""The first makes Ray's servers listen on 127.0.0.1 alone, on Linux, too; Ray reads it when it is imported."""
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
    os.environ.update({**LOOPBACK, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"} if address else LOOPBACK)
    try:
        import ray
    except ImportError as error:
        raise ValueError("a campaign needs Ray: pip install 'draftproof[campaign]'") from error
    with tempfile.TemporaryDirectory(prefix="draftproof-", ignore_cleanup_errors=True) as folder:
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if not address:
            options |= {"num_cpus": count, "include_dashboard": False, "object_store_memory": STORE_BYTES}
            options |= {"_temp_dir": folder}
        _init(ray, address, options)
        try:
            yield Workers(ray, gpus)
        finally:
            ray.shutdown()


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
