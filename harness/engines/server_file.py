"""What is known of an OpenAI-compatible server: a TOML file, of ours in `servers/` or of the user's own.

Either it has a `command`, which starts a server for each set-up, or the `address` of one that runs, with what it
`serves`. The rest says how requests are put into its words and where things stand in its answers. Field by field:
docs/servers.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.contract import Capabilities, SamplingParams

FOLDER = Path(__file__).parent / "servers"
STANDARD = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "stop": "stop",
    "n": "n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "logprobs": "logprobs",
}
"""Fields of a request that OpenAI's own completions have, and what they are called there."""
CARRIED = frozenset(field.name for field in fields(SamplingParams)) - {"max_new_tokens"}
"""Sampling fields that a file may give a name to."""
TUNED = ("page_size", "num_pages", "max_running", "chunk_size", "prefix_cache", "overlap", "seed", "device")
"""Set-up fields that a command may leave out; then they keep their defaults."""
PLACES = (*TUNED, "target", "port", "python", "dtype", "context_length")
DRAFTER_PLACES = (
    *("drafter", "k", "topk", "num_draft_tokens", "draft_sample_method", "prompt_lookup_min", "prompt_lookup_max"),
)
"""What a command may name in braces, and what the arguments of a drafter may name beside it."""
_CLAIMED = Capabilities(engine="", version="", drafters=frozenset(), features=frozenset())
PLACE = re.compile(r"\{([a-z_]+)\}")


class _Form(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of such a file: a field that is none is an error."""


class Switch(_Form, frozen=True, kw_only=True):
    """Arguments for a set-up field that is true, or false."""

    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()


class Drafter(_Form, frozen=True, kw_only=True):
    """`arguments` of the command that make it draft so. `architectures`: what the checkpoint's architecture is called
    there, where that is something else. `statistics`: whether those of [statistics] can be read of it."""

    arguments: tuple[str, ...]
    architectures: dict[str, str] = {}
    statistics: bool = True


class ServedDrafter(_Form, frozen=True, kw_only=True):
    """What a server that runs drafts with: the fields of `DrafterSetup`."""

    method: str
    num_steps: int
    model: str = ""


class Serves(_Form, frozen=True, kw_only=True):
    """What a server that runs was started with. `target` and the drafter's `model` are folders of checkpoints, from
    where the file lies."""

    target: str
    context_length: int
    dtype: Literal["float32", "bfloat16"] = "float32"
    drafter: ServedDrafter | None = None


class Statistics(_Form, frozen=True, kw_only=True):
    """Where the answer to a request has its accepted and its drafted tokens, step by step: dotted paths."""

    accepted: str
    drafted: str


class Counters(_Form, frozen=True, kw_only=True):
    """Counters in Prometheus' text form at `path`, by the names of `SpecCounters`."""

    path: str
    num_drafts: str
    num_draft_tokens: str
    num_accepted_tokens: str
    accepted_per_position: str


class Semantics(_Form, frozen=True, kw_only=True):
    """What servers do differently by design, by the names of `Capabilities`."""

    ignore_eos: Literal["emit", "ban"] = "emit"
    processor_order: tuple[str, ...] = _CLAIMED.processor_order
    drafts_with_prefill: bool = False
    drafts_within_cap: bool = False
    drafts_within_context: bool = False
    dead_end: Literal["ends", "goes_on"] = "goes_on"
    grammar_before_logprobs: bool = False
    stop_ids_end_grammars: bool = False
    seeds_of_samples: Literal["consecutive", "unknown"] = "unknown"


class Server(_Form, frozen=True, kw_only=True):
    """See docs/servers.md."""

    command: tuple[str, ...] = ()
    python: str = ""
    environment: dict[str, str] = {}
    inherit: tuple[str, ...] = ()
    health: str = "/health"
    refusals: tuple[str, ...] = ()
    patience: float = 280.0
    address: str = ""
    serves: Serves | None = None
    api_key_env: str = ""
    version: str = ""
    silence: float = 100.0
    reset: str = ""
    ids: str = "text"
    fields: dict[str, tuple[str, ...] | Switch] = {}
    drafters: dict[str, Drafter] = {}
    request: dict[str, str] = {}
    without_drafts: tuple[str, ...] = ()
    always: dict[str, Any] = {}
    statistics: Statistics | None = None
    counters: Counters | None = None
    semantics: Semantics = Semantics()

    @property
    def names(self) -> dict[str, str]:
        """Of every sampling field that the server takes, the field of a request that says it."""
        return {ours: theirs for ours, theirs in {**STANDARD, **self.request}.items() if theirs}

    def places(self) -> frozenset[str]:
        """What the command names."""
        return named(self.command)


def named(arguments: tuple[str, ...]) -> frozenset[str]:
    """The places in arguments, such as {port}."""
    return frozenset(name for part in arguments for name in PLACE.findall(part))


def read(path: Path) -> Server:
    """Raises ValueError naming the file, the field and the mend."""
    try:
        server = msgspec.toml.decode(path.read_bytes(), type=Server)
    except (msgspec.MsgspecError, OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; docs/servers.md has the form") from error
    for objection in _objections(server):
        raise ValueError(f"{path}: {objection}")
    return server


def presets() -> Mapping[str, Path]:
    """The files that come with us, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def _objections(server: Server) -> Iterator[str]:
    if bool(server.command) == bool(server.address):
        yield "give either a command that starts a server, or the address of one that runs"
    if bool(server.address) != (server.serves is not None):
        yield "an address goes with [serves]: which checkpoint is there, and how it was started"
    if server.command and not {"target", "port"} <= server.places():
        yield f"command={list(server.command)}: must name {{target}} and {{port}}"
    for where, arguments, known in _templates(server):
        for name in sorted(named(arguments) - set(known)):
            yield f"{where}: there is no place {{{name}}}; there are {', '.join(known)}"
    for name in sorted(set(server.fields) - set(TUNED)):
        yield f"fields.{name}: must be one of {', '.join(TUNED)}"
    for table, names in (("request", server.request), ("without_drafts", server.without_drafts)):
        for name in sorted(set(names) - CARRIED):
            yield f"{table}.{name}: must be one of {', '.join(sorted(CARRIED))}"


def _templates(server: Server) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    yield "command", server.command, PLACES
    for name, part in server.fields.items():
        yield f"fields.{name}", part if isinstance(part, tuple) else (*part.on, *part.off), PLACES
    for name, drafter in server.drafters.items():
        yield f"drafters.{name}", drafter.arguments, (*PLACES, *DRAFTER_PLACES)
