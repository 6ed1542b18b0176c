"""What an adapter of an engine in another process says of it: what it claims, and how it is spoken to."""

from __future__ import annotations

from typing import Any, Protocol

from harness.contract import Capabilities, EngineSetup, Refused, Request, SamplingParams

Words = dict[str, Any]
"""Plain JSON values, as the worker of that engine wants them."""


def refuse_setup(setup: EngineSetup, engine: str, *more: tuple[str, object, str], float64: bool = False) -> None:
    """Raises `Refused` for the set-up fields that no engine of this kind has a word for, and for (name, value, reason)
    of `more`; a value that is not asked for is false. `float64`: whether the engine has it. `poison` is refused by
    none: it is the reference engine's own."""
    for name, wanted, reason in (
        ("batch_buckets", setup.batch_buckets, "batches are padded for CUDA graphs only; leave it empty"),
        ("snapshots", setup.snapshots, "its KV is not looked at; set it to False"),
        ("kernels", setup.kernels != "auto" and setup.kernels, "it chooses its kernels itself; set it to auto"),
        ("dtype", setup.dtype == "float64" and not float64 and setup.dtype, f"{engine} has no float64; use float32"),
        *more,
    ):
        if wanted:
            raise Refused(f"{name}={wanted!r}: {reason}")


def require_least(setup: EngineSetup, **least: int) -> None:
    """Raises `Refused` for the set-up fields that are less than this, where engines take that for "no limit"."""
    for name, lowest in least.items():
        if getattr(setup, name) < lowest:
            raise Refused(f"{name}={getattr(setup, name)}: must be at least {lowest}")


def refuse_request(request: Request, *faults: tuple[str, object, str]) -> None:
    """Raises `Refused` for the first (field, wanted, reason) of which something is wanted; the field is one of the
    request or of its sampling parameters."""
    for name, wanted, reason in faults:
        if wanted:
            value = getattr(request if hasattr(request, name) else request.sampling, name)
            raise Refused(f"request {request.request_id!r}: {name}={value!r}: {reason}")


def summed_bias(sampling: SamplingParams) -> dict[int, float]:
    """`logit_bias` by token: of one with two biases the sum counts."""
    bias: dict[int, float] = {}
    for token_id, value in sampling.logit_bias:
        bias[token_id] = bias.get(token_id, 0.0) + value
    return bias


class Dialect(Protocol):
    """Pure functions of the engine's version and of what is asked for: they can be read and tested without the
    engine."""

    def capabilities(self, version: str, setup: EngineSetup) -> Capabilities:
        """What this version claims under `setup`."""
        ...

    def start(self, version: str, setup: EngineSetup) -> Words:
        """The set-up in the engine's own words; two that are equal mean the same engine. Raises `Refused` naming the
        field that cannot be said in them."""
        ...

    def request(self, request: Request, setup: EngineSetup) -> Words:
        """The request in the engine's own words. Raises `Refused`."""
        ...
