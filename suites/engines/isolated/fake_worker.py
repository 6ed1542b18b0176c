"""A worker without an engine: each request gets its prompt back, reversed. The fault that it has is named in the
environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ["WIRE"])
sys.path.append(os.environ.get("OURS", ""))

from wire import Refused, Wire, serve

FAULT = os.environ.get("FAULT", "")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def completion(request: dict[str, Any]) -> dict[str, Any]:
    tokens = list(reversed(request["prompt_token_ids"]))
    usage = {"prompt_tokens": len(tokens), "completion_tokens": len(tokens)}
    return {
        "request_id": request["request_id"],
        "index": 0,
        "prompt_token_ids": request["prompt_token_ids"],
        "token_ids": tokens,
        "finish_reason": "length",
        "usage": usage,
    }


def hang() -> None:
    while True:
        time.sleep(60)


class Served:
    def __init__(self) -> None:
        self.runs = 0
        self.speculative = False

    def load(self) -> None:
        if FAULT == "crash_in_load":
            raise ImportError("no module named fake_kernels")

    def start(self, words: dict[str, Any]) -> dict[str, Any]:
        say(f"starting on {words['target']}")
        if FAULT == "crash_in_start":
            raise RuntimeError("no kernel image is available")
        if FAULT == "hang_in_start":
            hang()
        if FAULT == "refuse":
            raise Refused("page_size=3: pages must hold a power of two")
        self.speculative = words["drafter"] is not None
        return {"process": os.getpid()}

    def run(self, order: dict[str, Any], _tensors: Any) -> Any:
        self.runs += 1
        say(f"run {self.runs}")
        if FAULT == "exit":
            say("about to go")
            os._exit(3)
        if FAULT == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if FAULT == "out_of_memory":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "hang":
            hang()
        if FAULT == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            hang()
        if FAULT == "flood":
            for _ in range(3000):
                os.write(1, b"x" * 10_000 + b"\n")
        if FAULT == "sees_ours":
            found = [find_spec(name) for name in ("harness", "kernels")]
            ours = [spec.origin for spec in found if spec and str(spec.origin).startswith(os.environ["OURS"])]
            raise ValueError(f"seen: {ours}")
        if FAULT == "raise":
            raise ValueError("tensor sizes do not match")
        if FAULT == "raise_on_long" and max(len(one["prompt_token_ids"]) for one in order["requests"]) >= 3:
            raise ValueError(f"a block of {len(order['requests'])} rows was due")
        if FAULT == "swapped" and self.speculative and len(order["requests"]) > 1:
            first, second, *rest = order["requests"]
            swapped = {**first, "prompt_token_ids": second["prompt_token_ids"]}
            return {"completions": [completion(one) for one in (swapped, second, *rest)]}
        if FAULT == "wrong_type":
            return {"completions": [{**completion(order["requests"][0]), "token_ids": "abc"}]}
        if FAULT == "no_such_tensor":
            lost = {"storage": "s9", "shape": [1], "stride": [1], "offset": 0}
            return {"completions": [{**completion(order["requests"][0]), "pooled_hidden": lost}]}
        if FAULT == "nothing":
            return None
        if FAULT == "raw_bytes":
            Wire._write = lambda wire, _: wire._out.write(b"INFO 11-30 engine.py: ready\n" * 4)  # type: ignore
        if FAULT == "once" and self.runs == 1 and not Path(os.environ["ONCE"]).exists():
            Path(os.environ["ONCE"]).touch()
            os._exit(9)
        if FAULT == "nan":
            rows = [{"token_id": 1, "logprob": float("nan"), "rank": 1, "top": [[1, float("-inf")]]}]
            return {"completions": [{**completion(request), "logprobs": rows} for request in order["requests"]]}
        return {"completions": [completion(request) for request in order["requests"]]}

    def reset(self) -> None:
        if FAULT == "exit_in_reset":
            os._exit(5)
        if FAULT == "raise_in_reset":
            raise RuntimeError("blocks are still held")

    def stop(self) -> None:
        """There is nothing to let go."""


if __name__ == "__main__":
    if FAULT == "no_hello":
        hang()
    if FAULT == "crash_at_import":
        raise ImportError("libcudart.so.12: cannot open shared object file")
    if FAULT == "another_version":
        import wire

        wire.VERSION = 99
    serve(Served(), {"name": "fake", "version": "1"})
