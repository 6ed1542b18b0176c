"""A program in llama-server's place: each request gets its prompt back, reversed, token by token. The fault that it has
is named in the environment."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FAULT = os.environ.get("FAULT", "")
TOGETHER = threading.Barrier(2)
LOADED = time.monotonic() + 0.2


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def pieces(body: dict[str, Any]) -> list[dict[str, Any]]:
    """After the first token, blocks of two drafts of which one is right, while there are two tokens left."""
    tokens = list(reversed(body["prompt"]))
    told, drafted, accepted = [], 0, 0
    for place, token in enumerate(tokens):
        if body["timings_per_token"] and place % 2 and place + 1 < len(tokens):
            drafted, accepted = drafted + 2, accepted + 1
        timings = {"cache_n": 1, **({"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {})}
        rows = [{"id": token, "logprob": -2.0, "top_logprobs": [{"id": 9, "logprob": -1.0}]}]
        shown = {"completion_probabilities": rows} if body["n_probs"] else {}
        told.append({"index": 0, "content": chr(97 + token), "tokens": [token], "timings": timings, **shown})
    end = {"tokens_predicted": len(tokens), "tokens_evaluated": len(tokens), "stop_type": "word"}
    return [*told, {"index": 0, "content": "", "tokens": [], "timings": {"cache_n": 1}, **end}]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        loading = FAULT == "never_loaded" or time.monotonic() < LOADED
        self._answer(503 if loading else 200, b'{"status": "ok"}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        say(f"asked for {body['prompt']}")
        if FAULT == "hangs":
            time.sleep(600)
        if FAULT == "declines":
            error = {"error": {"code": 400, "message": "Prompt contains invalid tokens"}}
            return self._answer(400, json.dumps(error).encode())
        if FAULT == "fails":
            return self._answer(500, b"no slot is free")
        if FAULT == "one_at_a_time":
            TOGETHER.wait(5)  # it answers only when two ask
        lines = [b"data: " + json.dumps(piece).encode() for piece in pieces(body)]
        if FAULT == "garbage":
            lines[1] = b"data: {not json"
        if FAULT == "fails_on_the_way":
            lines[1] = b'data: {"error": {"code": 500, "message": "decode() failed"}}'
        if FAULT == "breaks_off":
            lines = lines[:2]
        if FAULT == "dies":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + lines[0] + b"\n")
            self.wfile.flush()
            os.kill(os.getpid(), signal.SIGSEGV)
        return self._answer(200, b"\n\n".join([*lines, b""]))

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Not a word of each request."""


def main() -> None:
    if "--version" in sys.argv:
        say("version: 0.1.0-dev (build 77, commit 0000000)")
        return
    if FAULT == "refuses":
        say("0.1 E load_model: error loading model: missing tensor 'blk.0.attn_q.weight'")
        sys.exit(1)
    if FAULT == "crashes":
        say("GGML_ASSERT(n_layer == 1) failed")
        os.kill(os.getpid(), signal.SIGABRT)
    if FAULT == "port_taken" and not Path(os.environ["ONCE"]).exists():
        Path(os.environ["ONCE"]).touch()
        say("couldn't bind HTTP server socket")
        sys.exit(1)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Handler).serve_forever()


if __name__ == "__main__":
    main()
