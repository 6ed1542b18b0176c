"""GitHub's REST API for runners, as far as it is used here: a server on loopback with runners, groups and planned
failures."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

JIT = "generate-jitconfig"
CONFIGURATION = "jit-credential-of-"


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    authorization: str


@dataclass(frozen=True)
class Planned:
    """Answer the next request whose "METHOD path" matches `pattern` so. `carry_out`: do what was asked first. Status
    zero: close the connection without an answer."""

    pattern: str
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    carry_out: bool = False
    before_answer: Callable[[], None] = lambda: None


@dataclass
class FakeGitHub:
    token: str
    port: int = 0
    runners: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=lambda: {"Default": 1, "gpu": 7})
    planned: list[Planned] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    registered_ever: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(self, pattern: str, status: int, body: Any = b"", times: int = 1, **more: Any) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.planned += [Planned(pattern, status, raw, **more)] * times

    def requests(self, pattern: str) -> list[Asked]:
        return [one for one in self.asked if re.search(pattern, f"{one.method} {one.path}")]

    def answer(self, asked: Asked) -> tuple[int, Any]:
        """What GitHub would do."""
        if asked.path.startswith("/job-done/"):  # stands for the other API, that runners talk to
            self.runners.pop(int(asked.path.rpartition("/")[2]), None)
            return 204, None
        if asked.authorization != f"Bearer {self.token}":
            return 401, {"message": "Bad credentials"}
        if asked.path.endswith("/actions/runner-groups"):
            return 200, self._page(asked, "runner_groups", [{"id": i, "name": n} for n, i in self.groups.items()])
        if asked.path.endswith(f"/actions/runners/{JIT}"):
            return self._register(asked.body)
        if asked.path.endswith("/actions/runners"):
            named = [one for one in self.runners.values() if one["name"] == asked.query.get("name", one["name"])]
            return 200, self._page(asked, "runners", named)
        match = re.search(r"/actions/runners/(\d+)$", asked.path)
        if match and asked.method == "DELETE":
            return (204, None) if self.runners.pop(int(match[1]), None) else (404, {"message": "Not Found"})
        return 404, {"message": "Not Found"}

    def _register(self, body: dict[str, Any]) -> tuple[int, Any]:
        if any(one["name"] == body["name"] for one in self.runners.values()):
            return 409, {"message": "Already exists"}
        if body["runner_group_id"] not in self.groups.values():
            return 404, {"message": "Not Found"}
        number = 100 + len(self.registered_ever)
        runner = {"id": number, "name": body["name"], "status": "offline", "busy": False, "labels": []}
        self.runners[number] = runner
        self.registered_ever.append(body)
        encoded = base64.b64encode(f"{CONFIGURATION}{number}".encode()).decode()
        return 201, {"runner": runner, "encoded_jit_config": encoded}

    @staticmethod
    def _page(asked: Asked, key: str, found: list[Any]) -> dict[str, Any]:
        size, number = int(asked.query.get("per_page", 30)), int(asked.query.get("page", 1))
        return {"total_count": len(found), key: found[(number - 1) * size : number * size]}


@contextmanager
def serving(token: str) -> Iterator[FakeGitHub]:
    fake = FakeGitHub(token)

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            parts = urlsplit(self.path)
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = Asked(
                self.command,
                parts.path,
                {name: values[0] for name, values in parse_qs(parts.query).items()},
                json.loads(raw) if raw else None,
                self.headers.get("Authorization", ""),
            )
            fake.asked.append(asked)
            plan = next((one for one in fake.planned if re.search(one.pattern, f"{asked.method} {asked.path}")), None)
            if plan is None:
                status, body = fake.answer(asked)
                self._send(status, b"" if body is None else json.dumps(body).encode(), {})
                return
            fake.planned.remove(plan)
            if plan.carry_out:
                fake.answer(asked)
            plan.before_answer()
            if plan.status:
                self._send(plan.status, plan.body, plan.headers)
            self.close_connection = True

        do_GET = do_POST = do_DELETE = _handle

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
