"""Requests and runs of the reference engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from harness.contract import EngineSetup, Request, Run, SamplingParams
from harness.engines import engine_factory

PROMPT = (3, 4, 5)
Method = Literal["greedy", "probabilistic"]
"""How drafts of sampled requests are drawn."""


def ask(request_id: str = "a", prompt: Sequence[int] = PROMPT, **fields: Any) -> Request:
    """A request by the sampling fields that matter."""
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=SamplingParams(**fields))


def drawn(setup: EngineSetup, method: Method) -> EngineSetup:
    """The set-up with `draft_sample_method`."""
    assert setup.drafter is not None
    return replace(setup, drafter=replace(setup.drafter, draft_sample_method=method))


def run(setup: EngineSetup, requests: Sequence[Request]) -> Run:
    """Run `requests` to their end on a fresh engine."""
    return engine_factory("reference").start(setup).run(requests)
