"""JSON over HTTP, to a server on this machine or elsewhere. Standard library only, as everything that a worker imports.

Three ways to fail are told apart: the server says no (`Rejected`), it does not answer (`NoAnswer`), or what it answers
is no JSON object (`Nonsense`).
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

SHOWN = 500
"""Characters of an answer that an error shows."""


class Rejected(Exception):
    """A status of 400 or more. `retry_after`: seconds that the server asks to wait, None where it says nothing."""

    def __init__(self, status: int, reason: str, retry_after: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {reason}")
        self.status, self.reason, self.retry_after = status, reason, retry_after


class NoAnswer(Exception):
    """Nobody listens, the connection broke, or time is up."""


class Nonsense(Exception):
    """An answer that is no JSON object."""


def call(
    address: str,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    timeout: float,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """`address` as in http://127.0.0.1:8000, `timeout` in seconds of silence -> the JSON object that is answered.
    Raises `Rejected`, `NoAnswer`, `Nonsense`."""
    text = fetch(address, method, path, body, timeout, headers)
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise Nonsense(f"{method} {path}: no JSON ({error}): {_start(text)}") from error
    if not isinstance(answer, dict):
        raise Nonsense(f"{method} {path}: no JSON object: {_start(text)}")
    return answer


def fetch(
    address: str,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    timeout: float,
    headers: Mapping[str, str] | None = None,
) -> str:
    """The same -> the text that is answered, whatever it is."""
    parts = urlsplit(address if "//" in address else f"http://{address}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    data = None if body is None else json.dumps(body).encode()
    said = {"Content-Type": "application/json"} if data is not None else {}
    connection = kind(parts.netloc, timeout=timeout)
    try:
        connection.request(method, parts.path.rstrip("/") + path, data, {**said, **(headers or {})})
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
    except TimeoutError as error:
        raise NoAnswer(f"{method} {path}: silent for {timeout:g} s") from error
    except http.client.IncompleteRead as error:
        raise NoAnswer(f"{method} {path}: the answer breaks off after {len(error.partial)} bytes") from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{method} {path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if answer.status >= 400:
        raise Rejected(answer.status, _reason(text), _seconds(answer.getheader("Retry-After")))
    return text


def _reason(text: str) -> str:
    """The message of an error: servers put it at `error.message`, `message` or `detail`."""
    try:
        said = json.loads(text)
    except ValueError:
        return _start(text)
    inner = said.get("error", said) if isinstance(said, dict) else said
    if isinstance(inner, dict):
        inner = inner.get("message", inner.get("detail", inner))
    return inner if isinstance(inner, str) else _start(json.dumps(inner))


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:
        return None  # a date


def _start(text: str) -> str:
    return repr(text[:SHOWN]) + (f" and {len(text) - SHOWN} more characters" if len(text) > SHOWN else "")
