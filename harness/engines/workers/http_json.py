"""JSON over HTTP, to a server on this machine or elsewhere. Standard library only, as everything that a worker imports.

Three ways to fail are told apart: the server says no (`HttpError`), it does not answer or breaks off (`NoAnswer`), or
what it answers is no JSON object (`Nonsense`).
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

SHOWN = 500
"""Characters of an answer that an error shows."""
PATIENCE = 600.0
"""Seconds of silence that are waited for, where nobody says how many."""


class HttpError(RuntimeError):
    """A status that is no success. `said` is what the server says, `reason` the message in it; `retry_after`: seconds
    that it asks to wait, None where it says nothing."""

    def __init__(self, status: int, said: str, retry_after: float | None = None) -> None:
        self.reason = _reason(said)
        super().__init__(f"HTTP {status}: {self.reason}")
        self.status, self.said, self.retry_after = status, said, retry_after


class NoAnswer(ConnectionError):
    """Nobody listens, the connection broke, or time is up."""


class Nonsense(RuntimeError):
    """An answer that is no JSON object."""


def call(
    address: str,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    timeout: float = PATIENCE,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """`address` as in http://127.0.0.1:8000, `timeout` in seconds of silence -> the JSON object that is answered.
    Raises `HttpError`, `NoAnswer`, `Nonsense`."""
    return _decoded(fetch(address, method, path, body, timeout, headers), f"{method} {path}")


def fetch(
    address: str,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    timeout: float = PATIENCE,
    headers: Mapping[str, str] | None = None,
) -> str:
    """The same -> the text that is answered, whatever it is."""
    with _answer(address, method, path, body, timeout, headers) as response:
        return response.read().decode("utf-8", "replace")


def events(
    address: str,
    path: str,
    body: Mapping[str, Any],
    timeout: float = PATIENCE,
    headers: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """What a server sends piece by piece ("data: JSON" lines), until "[DONE]" or its end. An "error: ..." line is an
    `HttpError` of the status that came before it. Raises as `call` does."""
    with _answer(address, "POST", path, body, timeout, headers) as response:
        for line in response:
            if not line.endswith(b"\n"):
                raise NoAnswer(f"POST {path}: the answer broke off in {line[:SHOWN]!r}")
            name, _, data = line.decode("utf-8", "replace").strip().partition(": ")
            if name == "data" and data != "[DONE]":
                yield _decoded(data, f"POST {path}")
            elif name == "error":
                raise HttpError(response.status, data)


@contextmanager
def _answer(
    address: str,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    timeout: float,
    headers: Mapping[str, str] | None,
) -> Iterator[http.client.HTTPResponse]:
    """A good answer, whose body is still to come; what breaks while it is read is a `NoAnswer`, too."""
    parts = urlsplit(address if "//" in address else f"http://{address}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    data = None if body is None else json.dumps(body).encode()
    said = {"Content-Type": "application/json"} if data is not None else {}
    connection = kind(parts.netloc, timeout=timeout)
    try:
        connection.request(method, parts.path.rstrip("/") + path, data, {**said, **(headers or {})})
        response = connection.getresponse()
        if not 200 <= response.status < 300:
            text = response.read().decode("utf-8", "replace").strip()
            raise HttpError(response.status, text, _seconds(response.getheader("Retry-After")))
        yield response
    except NoAnswer:
        raise
    except TimeoutError as error:
        raise NoAnswer(f"{method} {path}: silent for {timeout:g} s") from error
    except http.client.IncompleteRead as error:
        raise NoAnswer(f"{method} {path}: the answer breaks off after {len(error.partial)} bytes") from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{method} {path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _decoded(text: str, asked: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise Nonsense(f"{asked}: the server answered what is no JSON ({error}): {_start(text)}") from error
    if not isinstance(answer, dict):
        raise Nonsense(f"{asked}: the server answered what is no JSON object: {_start(text)}")
    return answer


def _reason(text: str) -> str:
    """The message of an error: servers put it at `error.message`, `message` or `detail`."""
    try:
        said = json.loads(text)
    except ValueError:
        return text[:SHOWN]
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
