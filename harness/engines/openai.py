"""Any OpenAI-compatible server, over HTTP: a black box. Which one, and how it is spoken to, says a file:
`harness.engines.server_file`.

What the file has no words for is refused, by the name of the field. Completions are asked for with token ids, whole,
and read as they come: nothing is streamed, nothing is looked into, and requests can neither arrive late nor be aborted.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import msgspec

from harness.contract import Capabilities, DrafterSetup, EngineSetup, Refused, Request, SamplingParams, SpecCounters
from harness.engines import environments, server_file
from harness.engines.isolated import IsolatedFactory, Words
from harness.engines.isolated.base import refuse_request, refuse_setup, require_least, summed_bias
from harness.engines.isolated.engine import WORKERS
from harness.engines.server_file import Server, Switch, named

ROOM = 2
"""Servers that are kept for who wants an equal one: each is a program of its own, and takes memory."""
BESIDE = tuple(WORKERS / name for name in ("http_json.py", "openai_answers.py", "server_process.py"))
ECHO = "echo"
"""`prompt_logprobs` of a server that gives them in front of the others, when it repeats the prompt."""
DEFAULTS = EngineSetup(target=Path())
PLAIN = SamplingParams()
NO_FIELD = "OpenAI's completions have no such field"
NOT_ASKED = {
    "return_hidden_states": False,
    "pooled_hidden": None,
    "num_speculative_tokens": None,
    "arrival_step": 0,
    "abort_step": None,
}
"""Fields of a request that no server is told of, where they ask for nothing."""


class OpenAIFactory(IsolatedFactory):
    """A server by the name of a file of ours, NAME@VERSION or NAME@PATH of a Python where it runs in an environment of
    another engine, or by the path of a file that ends in .toml."""

    def __init__(self, where: str = "") -> None:
        path, python_of = _file(where)
        server = server_file.read(path)
        self._recipe = _recipe(server, path)
        self._engine_python = self._recipe.python(python_of) if self._recipe is not None else Path()
        self._server_file = server
        super().__init__(
            "openai",
            OpenAIDialect(server, path.parent, self._engine_python),
            Path(sys.executable),
            WORKERS / "openai_worker.py",
            room=ROOM,
            beside=BESIDE,
            inherit=(*server.inherit, *filter(None, [server.api_key_env])),
        )

    @cached_property
    def version(self) -> str:
        """What the file says, or that of the environment."""
        if self._server_file.version or self._recipe is None:
            return self._server_file.version or "unknown"
        return environments.version_of(self._recipe, self._engine_python)


def _file(where: str) -> tuple[Path, str]:
    """The file, and whose Python is meant. Raises ValueError naming what there is."""
    if where.endswith(".toml"):
        return Path(where).absolute(), ""
    name, _, python_of = where.partition("@")
    known = server_file.presets()
    if name not in known:
        raise ValueError(
            f"engine=openai{'@' if where else ''}{where}: name a server: openai@{', openai@'.join(known)}, or "
            "openai@FILE.toml that describes one of your own (docs/servers.md)"
        )
    return known[name], python_of


def _recipe(server: Server, path: Path) -> environments.Recipe | None:
    from harness.engines import recipes

    if not server.python:
        return None
    known = recipes()
    if server.python not in known:
        raise ValueError(
            f"{path}: python={server.python!r}: must be one of {', '.join(known)}, to have its environment"
        )
    return known[server.python]


class OpenAIDialect:
    """What a file claims, and its words. `folder`: where it lies."""

    def __init__(self, server: Server, folder: Path, python: Path) -> None:
        self.server, self.folder, self.python = server, folder, python

    def capabilities(self, version: str, setup: EngineSetup) -> Capabilities:
        server = self.server
        served = server.serves and server.serves.drafter
        tuned = {name for name in server_file.TUNED if name in server.fields or name in server.places()}
        return Capabilities(
            engine="openai",
            version=version,
            drafters=frozenset([served.method] if served else server.drafters),
            features=frozenset(server.names) - {*(server.without_drafts if setup.drafter is not None else ())} | tuned,
            tells_ranks=False,
            tells_acceptance=setup.drafter is None or self._statistics(setup),
            **msgspec.structs.asdict(server.semantics),
        )

    def start(self, version: str, setup: EngineSetup) -> Words:
        """The command with its places, or the address; and where things stand in the answers."""
        del version
        server = self.server
        refuse_setup(setup, "an OpenAI-compatible server")
        require_least(setup, chunk_size=1, max_running=1, context_length=1, num_pages=0)
        if server.serves is not None:
            self._must_be_served(setup, server.serves)
        statistics = server.statistics if self._statistics(setup) else None
        counters = server.counters if statistics is not None else None
        drafter = server.drafters.get(setup.drafter.method) if setup.drafter is not None else None
        names = [field.name for field in fields(SpecCounters)] if counters is not None else []
        return {
            "target": str(setup.target),
            "address": server.address,
            "command": self._command(setup) if server.command else [],
            "places": self._places(setup),
            "environment": {**self._variables(), **server.environment},
            "health": server.health,
            "refusals": list(server.refusals),
            "patience": server.patience,
            "renamed": drafter.architectures if drafter is not None else {},
            "api_key_env": server.api_key_env,
            "silence": server.silence,
            "reset": server.reset,
            "metrics": counters.path if counters is not None else "",
            "counters": {name: getattr(counters, name) for name in names},
            "form": {
                "ids": server.ids,
                "accepted": statistics.accepted if statistics is not None else "",
                "drafted": statistics.drafted if statistics is not None else "",
            },
        }

    def request(self, request: Request, setup: EngineSetup) -> Words:
        """The body of a completion, less what the worker knows: model and prompt."""
        del setup
        refuse_request(
            request, *((name, getattr(request, name) != plain, NO_FIELD) for name, plain in NOT_ASKED.items())
        )
        sampling, body = request.sampling, dict(self.server.always)
        asked = {
            field.name: getattr(sampling, field.name)
            for field in fields(SamplingParams)
            if getattr(sampling, field.name) != getattr(PLAIN, field.name)
        }
        asked |= {"temperature": sampling.temperature}  # greedy is no server's default
        asked.pop("max_new_tokens", None)
        body["max_tokens"] = sampling.max_new_tokens
        as_text = {}
        for name, value in asked.items():
            theirs = self.server.names.get(name)
            if theirs is None:
                raise Refused(f"request {request.request_id!r}: {name}={value!r}: the server's file has no word for it")
            if name == "bad_words":
                as_text[theirs] = [list(word) for word in value]
            elif theirs != ECHO:
                _put(body, theirs, _value(name, theirs, value, sampling))
        self._echo(body, request)
        return {
            "id": request.request_id,
            "prompt_token_ids": list(request.prompt_token_ids),
            "logprobs": sampling.logprobs,
            "prompt_logprobs": sampling.prompt_logprobs,
            "body": body,
            "as_text": as_text,
        }

    def _echo(self, body: dict[str, Any], request: Request) -> None:
        """Logprobs of the prompt in front of the others, and those of the output where ids are read from them."""
        sampling = request.sampling
        wanted = [value for value in (sampling.logprobs,) if value is not None]
        if self.server.names.get("prompt_logprobs") == ECHO and sampling.prompt_logprobs is not None:
            body["echo"] = True
            wanted.append(max(1, sampling.prompt_logprobs))
        if self.server.ids == "logprobs":
            wanted.append(0)
        if wanted and "logprobs" in self.server.names:
            body[self.server.names["logprobs"]] = max(wanted)

    def _statistics(self, setup: EngineSetup) -> bool:
        """Whether verify steps are told of under this set-up."""
        if setup.drafter is None or self.server.statistics is None:
            return False
        drafter = self.server.drafters.get(setup.drafter.method)
        return drafter.statistics if drafter is not None else self.server.serves is not None

    def _variables(self) -> Mapping[str, str]:
        from harness.engines import recipes

        return recipes()[self.server.python].variables if self.server.python else {}

    def _command(self, setup: EngineSetup) -> list[str]:
        """The command, with the arguments of what differs from the defaults, and of the drafter."""
        arguments = list(self.server.command)
        for name in server_file.TUNED:
            value, part = getattr(setup, name), self.server.fields.get(name)
            if isinstance(part, Switch):
                arguments += part.on if value else part.off
            elif value != getattr(DEFAULTS, name):
                if part is None and name not in self.server.places():
                    raise Refused(f"{name}={value!r}: the server's file has no arguments for it, see [fields]")
                arguments += part or ()
        for name in ("dtype", "context_length"):
            if name not in self.server.places():
                raise Refused(f"{name}={getattr(setup, name)!r}: the command of the server's file does not name it")
        if setup.drafter is not None:
            arguments += self._drafting(setup.drafter)
        return arguments

    def _drafting(self, drafter: DrafterSetup) -> tuple[str, ...]:
        known = self.server.drafters.get(drafter.method)
        if known is None:
            there = ", ".join(sorted(self.server.drafters)) or "none"
            raise Refused(f"drafter.method={drafter.method!r}: the server's file has arguments for {there}")
        places = named(known.arguments)
        chain = DrafterSetup.chain(drafter.method, drafter.num_steps)
        for name in ("topk", "draft_sample_method"):
            if name not in places and getattr(drafter, name) != getattr(chain, name):
                raise Refused(f"drafter.{name}={getattr(drafter, name)!r}: drafters.{drafter.method} does not name it")
        return known.arguments

    def _places(self, setup: EngineSetup) -> dict[str, str]:
        if not self.server.command:
            return {}
        k = setup.drafter.num_steps if setup.drafter is not None else 0
        told: dict[str, object] = {name: getattr(setup, name) for name in server_file.TUNED}
        told |= {"target": setup.target, "dtype": setup.dtype, "context_length": setup.context_length}
        # A chunk that held less than a block of drafts would cut them; none is longer than the context.
        chunk_size = min(max(setup.chunk_size, 1 + k), setup.context_length)
        told |= {"python": self.python, "chunk_size": chunk_size}
        if setup.drafter is not None:
            drafter = setup.drafter
            told |= {name: getattr(drafter, name) for name in server_file.DRAFTER_PLACES if hasattr(drafter, name)}
            told |= {"drafter": drafter.model or setup.target, "k": k}
        return {name: str(value) for name, value in told.items()}

    def _must_be_served(self, setup: EngineSetup, serves: server_file.Serves) -> None:
        """Raises `Refused` for anything but what the server was started with."""
        where = f"the server at {self.server.address}"
        _must_be_same("target", setup.target, self.folder / serves.target, where)
        for name in ("context_length", "dtype"):
            if getattr(setup, name) != getattr(serves, name):
                raise Refused(f"{name}={getattr(setup, name)!r}: {where} was started with {getattr(serves, name)!r}")
        for name in server_file.TUNED:
            if getattr(setup, name) != getattr(DEFAULTS, name):
                raise Refused(f"{name}={getattr(setup, name)!r}: {where} runs already and cannot be set up otherwise")
        drafter, served = setup.drafter, serves.drafter
        told = (drafter.method, drafter.num_steps) if drafter is not None else "none"
        runs = (served.method, served.num_steps) if served is not None else "none"
        if told != runs:
            raise Refused(f"drafter={told}: {where} drafts with {runs}")
        if drafter is not None and served is not None and drafter.model is not None:
            _must_be_same("drafter.model", drafter.model, self.folder / served.model, where)


def _must_be_same(name: str, asked: Path, served: Path, where: str) -> None:
    if fingerprint(asked) != fingerprint(served):
        raise Refused(f"{name}={asked}: {where} serves the checkpoint in {served}, which is another")


@cache
def fingerprint(model: Path) -> str:
    """Of a checkpoint's configuration and weights. Raises `Refused` when there is none."""
    files = sorted(file for file in model.glob("*") if file.suffix == ".safetensors" or file.name == "config.json")
    if not files:
        raise Refused(f"{model}: there is no checkpoint; draftproof known-answer build writes one")
    told = hashlib.sha256()
    for file in files:
        told.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return told.hexdigest()


def _put(body: dict[str, Any], path: str, value: Any) -> None:
    """Set what a dotted path names."""
    *outer, last = path.split(".")
    for name in outer:
        body = body.setdefault(name, {})
    body[last] = value


def _value(name: str, theirs: str, value: Any, sampling: SamplingParams) -> Any:
    """A field's value as JSON of such a server has it."""
    if name == "logit_bias":
        return {str(token_id): bias for token_id, bias in summed_bias(sampling).items()}
    if name == "json_schema" and theirs == "response_format":
        return {"type": "json_schema", "json_schema": {"name": "text", "schema": json.loads(value)}}
    return list(value) if isinstance(value, tuple) else value
