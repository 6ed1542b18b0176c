"""What speculation gains on text: the trained target and its EAGLE3 drafter, one request at a time, held-out prompts,
against the same engine without a drafter. Runs take turns, prompt by prompt.
"""

from __future__ import annotations

import math
import random
import sys
import time

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from harness.trained.checkpoints import WEIGHTS
from harness.trained.text import prompts
from reference_engine import EngineConfig, LLMEngine, SamplingParams, SpecConfig
from suites.registration import suite

suite(seconds=30, stage="bench", needs="cpu")

pytestmark = pytest.mark.perf

K, NUM_PROMPTS, NUM_TOKENS, ROUNDS = 3, 20, 96, 5
CONTEXT = 192
TOKENS_PER_FORWARD = 3.63
"""Counted: the same on every machine but for near ties in float32, of which 1,900 tokens have few."""
LEAST_SPEED_UP = 1.3
"""Counted in decoder layers that are run, and timed by the CPU time of the thread."""


def start(spec: SpecConfig | None) -> LLMEngine:
    return LLMEngine(
        EngineConfig(model=WEIGHTS / "target", spec=spec, context_length=CONTEXT, max_running=1, prefix_cache=False)
    )


def answer(engine: LLMEngine, prompt: tuple[int, ...]) -> tuple[list[int], float, float]:
    """Tokens, and seconds that they took: CPU time of this thread, and wall."""
    cpu, wall = time.thread_time(), time.perf_counter()
    engine.add_request("a", prompt, SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True))
    tokens: list[int] = []
    while engine.has_unfinished:
        for output in engine.step().outputs:
            tokens += output.token_ids
    return tokens, time.thread_time() - cpu, time.perf_counter() - wall


def test_eagle3_on_held_out_prompts(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """Neighbours make a run longer, never shorter: a prompt's time is the least of its rounds, and the speed-up that of
    all prompts together, those on which little is accepted included."""
    torch.set_num_threads(1)
    spec = SpecConfig(method="EAGLE3", model=WEIGHTS / "eagle3", num_steps=K, num_draft_tokens=K + 1)
    speculative, plain = engines = start(spec), start(None)
    asked, order = prompts(NUM_PROMPTS), random.Random(0)
    cpu, wall = ({engine: [math.inf] * NUM_PROMPTS for engine in engines} for _ in range(2))

    def in_turns() -> None:
        for index, prompt in enumerate(asked):
            said = {}
            for engine in order.sample(engines, 2):
                said[engine], *seconds = answer(engine, prompt)
                for least, taken in zip((cpu, wall), seconds, strict=True):
                    least[engine][index] = min(least[engine][index], taken)
            assert said[speculative] == said[plain]

    in_turns()
    before = [engine.runner.num_target_forwards for engine in engines]
    drafted = forwards_of_drafter(speculative)
    benchmark.pedantic(in_turns, rounds=ROUNDS, iterations=1)
    after = [engine.runner.num_target_forwards for engine in engines]
    forwards, baseline = (end - start for start, end in zip(before, after, strict=True))
    drafted = forwards_of_drafter(speculative) - drafted
    tokens = ROUNDS * NUM_PROMPTS * NUM_TOKENS
    layers = plain.model_config.num_layers
    figures = {
        "tokens_per_forward": tokens / forwards,
        "speed_up_layers": layers * baseline / (layers * forwards + drafted),
        "speed_up_cpu": sum(cpu[plain]) / sum(cpu[speculative]),
        "speed_up_wall": sum(wall[plain]) / sum(wall[speculative]),
    }
    benchmark.extra_info.update(figures)
    with capsys.disabled():
        told = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
        sys.stdout.write(f"\nEAGLE3, k = {K}, batch 1, {NUM_PROMPTS} held-out prompts: {told}\n")
    assert baseline == tokens
    assert figures["tokens_per_forward"] == pytest.approx(TOKENS_PER_FORWARD, rel=0.01)
    assert figures["speed_up_layers"] >= LEAST_SPEED_UP
    assert figures["speed_up_cpu"] >= LEAST_SPEED_UP


def forwards_of_drafter(engine: LLMEngine) -> int:
    """Passes through its only layer."""
    assert engine.drafter is not None
    return engine.drafter.num_forwards
