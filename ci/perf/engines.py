"""The reference engine with one drafter lane on one checkpoint, and what it is asked to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from harness.workloads.lanes import LANES
from reference_engine import EngineConfig, LLMEngine, SamplingParams, SpecConfig
from reference_engine.engine import StepOutput

NUM_STEPS = 3
"""Drafts of a chain, depth of a tree."""
CONTEXT = 192
SHORTEST, RAGGED = 8, 3
"""Tokens of the shortest prompt, and by how many each next one is longer."""


def last_token_again(_request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
    """A script that costs nothing: what is measured is the engine around it."""
    return tokens[-1:] * k


def start(checkpoint: Path, lane: str, batch: int, *, drafting: bool = True, device: str = "cpu") -> LLMEngine:
    """Neither traces nor poison; no prefix cache, so that a later run does not profit from an earlier one.
    `drafting=False`: the lane's target alone."""
    spec = LANES[lane]
    setup = spec.drafter(NUM_STEPS, checkpoint, last_token_again if spec.scripted else None)
    drafter = None
    if setup is not None and drafting:
        drafter = SpecConfig(**{field.name: getattr(setup, field.name) for field in fields(SpecConfig)})
    return LLMEngine(
        EngineConfig(
            model=checkpoint / spec.target_folder(),
            spec=drafter,
            context_length=CONTEXT,
            max_running=batch,
            prefix_cache=False,
            kernels="torch" if device == "cpu" else "auto",
            device=device,
        )
    )


def prompts(batch: int) -> list[list[int]]:
    """Ragged, of ids that every checkpoint has."""
    return [[3 + (5 * row + place) % 12 for place in range(SHORTEST + RAGGED * row)] for row in range(batch)]


def ask(engine: LLMEngine, batch: int, tokens: int) -> None:
    """Queue a batch of greedy requests."""
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    for row, prompt in enumerate(prompts(batch)):
        engine.add_request(str(row), prompt, sampling)


def steps(engine: LLMEngine, batch: int, tokens: int) -> Iterator[StepOutput]:
    """Run a batch to its end."""
    ask(engine, batch, tokens)
    while engine.has_unfinished:
        yield engine.step()


def generate(engine: LLMEngine, batch: int, tokens: int) -> dict[str, list[int]]:
    """Run a batch to its end -> the tokens of each request."""
    made: dict[str, list[int]] = {str(row): [] for row in range(batch)}
    for step in steps(engine, batch, tokens):
        for output in step.outputs:
            made[output.request_id] += output.token_ids
    return made
