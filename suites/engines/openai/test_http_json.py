"""What workers know of HTTP: an answer, a no with its reason, and each way in which an answer does not come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from suites.engines.openai.arrange import http_json
from suites.registration import suite

suite(seconds=0.6, stage="cpu", needs="cpu")


class Says(BaseHTTPRequestHandler):
    """Answers what a test has laid down: status, headers, body."""

    answer: ClassVar[tuple[int, dict[str, str], bytes]]

    def do_POST(self) -> None:
        status, headers, body = Says.answer
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Says)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


def test_an_answer(address: str) -> None:
    Says.answer = (200, {}, b'{"a": 1}')
    for way in (address, f"http://{address}", f"http://{address}/base/"):
        assert http_json.call(way, "POST", "/x", {}, 5.0) == {"a": 1}


def test_an_answer_in_pieces(address: str) -> None:
    Says.answer = (200, {}, b'data: {"a": 1}\n\n: alive\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n')
    assert list(http_json.events(address, "/x", {})) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"message": "too long"}', "too long"),
        (b'{"detail": "too long"}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b"no slot", "no slot"),
    ],
)
def test_a_no_comes_with_its_reason(address: str, body: bytes, reason: str) -> None:
    Says.answer = (400, {"Retry-After": "1.5"}, body)
    with pytest.raises(http_json.HttpError) as caught:
        http_json.call(address, "POST", "/x", {})
    assert (caught.value.status, caught.value.reason, caught.value.retry_after) == (400, reason, 1.5)
    assert caught.value.said == body.decode()


@pytest.mark.parametrize("body", [b"{", b"[1]", b""])
def test_what_is_no_json_object(address: str, body: bytes) -> None:
    Says.answer = (200, {}, body)
    with pytest.raises(http_json.Nonsense, match="POST /x: the server answered what is no JSON"):
        http_json.call(address, "POST", "/x", {})


def test_an_answer_that_breaks_off(address: str) -> None:
    Says.answer = (200, {"Content-Length": "99"}, b'{"a": ')
    with pytest.raises(http_json.NoAnswer, match="breaks off after 6 bytes"):
        http_json.call(address, "POST", "/x", {})
    Says.answer = (200, {}, b'data: {"a": 1}\n\ndata: {"a"')
    with pytest.raises(http_json.NoAnswer, match="broke off in"):
        list(http_json.events(address, "/x", {}))


def test_an_error_among_the_pieces(address: str) -> None:
    Says.answer = (200, {}, b'data: {"a": 1}\n\nerror: {"message": "no room"}\n\n')
    with pytest.raises(http_json.HttpError, match="no room"):
        list(http_json.events(address, "/x", {}))


def test_nobody_listens() -> None:
    with pytest.raises(http_json.NoAnswer, match="POST /x: ConnectionRefusedError"):
        http_json.call("127.0.0.1:1", "POST", "/x", {})
