"""A server like OpenAI's, of a Markov checkpoint: it reads the weights, works out the law of each token, and answers by
it. The fault that it has is named on its command line."""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

HEAD_DIM = 32
EPS = 1e-12


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Chain:
    """`log_law[t]` is the law of the token behind t, [V, V] natural logs: rows go through the layers by themselves."""

    def __init__(self, model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        size, width = config["vocab_size"], config["hidden_size"]
        if width != 2 * size:
            raise ValueError(
                f"hidden_size={width}: this server knows Markov chains, whose rows have {2 * size} entries"
            )
        weights = tensors(model / "model.safetensors")
        rows = weights["model.embed_tokens.weight"]
        for layer in range(config["num_hidden_layers"]):
            part = {name: weights[f"model.layers.{layer}.{name}.weight"] for name in PARTS}
            rows = rows + attended(normed(rows, part["input_layernorm"]), part)
            rows = rows + looked_up(normed(rows, part["post_attention_layernorm"]), part)
        logits = normed(rows, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
        self.log_law = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        self.eos = config["eos_token_id"]
        vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        self.texts = {token: text for text, token in vocabulary.items()}
        self.context = 0

    def text(self, tokens: list[int]) -> str:
        return "".join(self.texts[token] for token in tokens if token != self.eos)


PARTS = (
    *("input_layernorm", "post_attention_layernorm", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def tensors(file: Path) -> dict[str, np.ndarray]:
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    return {
        name: np.frombuffer(body[slice(*one["data_offsets"])], np.float32).reshape(one["shape"]).astype(np.float64)
        for name, one in head.items()
        if name != "__metadata__"
    }


def normed(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS) * weight


def attended(rows: np.ndarray, part: dict[str, np.ndarray]) -> np.ndarray:
    """Heads look at their own row alone; several share a head of keys and values."""
    values = (rows @ part["self_attn.v_proj"].T).reshape(len(rows), -1, HEAD_DIM)
    times = part["self_attn.o_proj"].shape[1] // HEAD_DIM // values.shape[1]
    return np.repeat(values, times, axis=1).reshape(len(rows), -1) @ part["self_attn.o_proj"].T


def looked_up(rows: np.ndarray, part: dict[str, np.ndarray]) -> np.ndarray:
    gate = np.clip(rows @ part["mlp.gate_proj"].T, -300, 300)
    return (gate / (1 + np.exp(-gate)) * (rows @ part["mlp.up_proj"].T)) @ part["mlp.down_proj"].T


@dataclass
class Sample:
    """One sample of a request, as it grows."""

    chain: Chain
    asked: dict[str, Any]
    rng: random.Random
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    text: str = ""

    def run(self) -> Sample:
        room = min(self.asked["max_tokens"], self.chain.context - len(self.asked["prompt"]))
        text: str | None = None
        while len(self.tokens) < room and text is None:
            self.tokens.append(self._next())
            text = self._stopped()
        self.finish = "length" if text is None else "stop"
        self.text = self.chain.text(self.tokens) if text is None else text
        return self

    def _next(self) -> int:
        asked, last = self.asked, [*self.asked["prompt"], *self.tokens][-1]
        scores = self.chain.log_law[last].copy()
        for token, bias in (asked.get("logit_bias") or {}).items():
            scores[int(token)] += bias
        for token in set(self.tokens):
            scores[token] -= asked.get("presence_penalty", 0.0)
            scores[token] -= asked.get("frequency_penalty", 0.0) * self.tokens.count(token)
        if len(self.tokens) < asked.get("min_tokens", 0):
            scores[[self.chain.eos, *asked.get("stop_token_ids", ())]] = -np.inf
        if not asked["temperature"]:
            return int(scores.argmax())
        chances = np.exp((scores - scores.max()) / asked["temperature"])
        best = np.argsort(-chances)
        chances = chances[best] / chances.sum()
        kept = chances.cumsum() - chances < asked.get("top_p", 1.0)
        return int(self.rng.choices(best.tolist(), (chances * kept).tolist())[0])

    def _stopped(self) -> str | None:
        """The text, if this is its end: without the stop. Stop strings count behind `min_tokens`."""
        asked, text = self.asked, self.chain.text(self.tokens)
        least = len(self.chain.text(self.tokens[: asked.get("min_tokens", 0)]))
        found = [text.find(stop, max(least - len(stop) + 1, 0)) for stop in asked.get("stop") or ()]
        ends = [place for place in found if place >= 0]
        if ends:
            return text[: min(ends)]
        last, stops = self.tokens[-1], [*asked.get("stop_token_ids", ())]
        stops += [] if asked.get("ignore_eos") else [self.chain.eos]
        return self.chain.text(self.tokens[:-1]) if last in stops else None


def rows(chain: Chain, tokens: list[int], start: int, num_top: int) -> dict[str, Any]:
    """Logprobs of `tokens` from `start` on; the first of all has none."""
    made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    for place in range(start, len(tokens)):
        law = chain.log_law[tokens[place - 1]]
        made["tokens"].append(chain.texts[tokens[place]])
        made["token_logprobs"].append(float(law[tokens[place]]) if place else None)
        best = [int(token) for token in np.argsort(-law)[:num_top]] + [tokens[place]]
        made["top_logprobs"].append({chain.texts[token]: float(law[token]) for token in best} if place else None)
    return made


def objections(asked: dict[str, Any]) -> Iterator[str]:
    ids = [*asked["prompt"], *asked.get("stop_token_ids", ()), *map(int, asked.get("logit_bias", ()))]
    for token in ids:
        if not 0 <= token < len(CHAIN.log_law):
            yield f"token {token} is outside the vocabulary of {len(CHAIN.log_law)}"
    if len(asked["prompt"]) >= CHAIN.context:
        yield f"a prompt of {len(asked['prompt'])} tokens fills the context of {CHAIN.context}"


def answer(chain: Chain, asked: dict[str, Any]) -> dict[str, Any]:
    prompt, choices = asked["prompt"], []
    for index in range(asked.get("n", 1)):
        seed = asked.get("seed")
        sample = Sample(chain, asked, random.Random(None if seed is None else seed + index)).run()
        if FAULT == "wrong_token":
            sample.tokens[-1] = (sample.tokens[-1] + 1) % len(chain.log_law)
        told = [*prompt, *sample.tokens]
        start = 0 if asked.get("echo") else len(prompt)
        choice = {"index": index, "text": chain.text(told[start : len(prompt)]) + sample.text}
        choice |= {"finish_reason": sample.finish, "token_ids": sample.tokens}
        if asked.get("logprobs") is not None and FAULT != "no_logprobs":
            choice["logprobs"] = rows(chain, told, start, asked["logprobs"])
        choices.append(choice)
    count = sum(len(choice["token_ids"]) for choice in choices) + (FAULT == "billed_one_more")
    if FAULT == "no_ids":
        for choice in choices:
            del choice["token_ids"]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    return {"id": "cmpl-1", "object": "text_completion", "choices": choices, "usage": usage}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    busy = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/health":
            self.told(200, b"")
        else:
            self.told(200, json.dumps({"data": [{"id": "markov"}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if KEY and self.headers["Authorization"] != f"Bearer {KEY}":
            return self.fails(401, "who are you?")
        if FAULT == "500":
            say("CUDA error: device-side assert triggered")
            return self.fails(500, "internal server error")
        if FAULT == "hang":
            time.sleep(60)
        if FAULT == "die":
            say("Segmentation fault (core dumped)")
            os._exit(7)
        if FAULT == "garbage":
            return self.told(200, b"<html>502 Bad Gateway</html>")
        if FAULT == "no_choices":
            return self.told(200, b'{"object": "text_completion"}')
        if FAULT in ("busy", "busy_forever"):
            with Handler.lock:
                Handler.busy += 1
                if FAULT == "busy_forever" or Handler.busy <= 2:
                    return self.fails(429, "too many requests", {"Retry-After": "0.1"})
        for objection in objections(asked):
            return self.fails(400, objection)
        text = json.dumps(answer(CHAIN, asked)).encode()
        return self.told(200, text, cut=FAULT == "truncated")

    def fails(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        self.told(status, json.dumps({"error": {"message": message, "code": status}}).encode(), headers)

    def told(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """It says what matters itself."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--fault", default="")
    parser.add_argument("--dtype", choices=["float32"], required=True)
    return parser.parse_args()


if __name__ == "__main__":
    told = arguments()
    FAULT = told.fault
    KEY = os.environ.get("FAKE_KEY", "")
    say(f"serving {told.target}")
    if FAULT == "crash_at_start":
        raise RuntimeError("no kernel image is available")
    CHAIN = Chain(told.target)
    CHAIN.context = told.context
    if FAULT == "never_well":
        time.sleep(60)
    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(("127.0.0.1", told.port), Handler).serve_forever()
