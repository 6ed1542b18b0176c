"""The reference engine against transformers' batched `generate` and, where it is installed, vLLM: same checkpoint,
prompts, machine, run and number of threads, rounds interleaved. No speculation: `test_speed_up.py` is about that.

Wall time is reported; of the trained target, whose tokens are like a user's, it is judged, too (`LEAST`), of the eager
engine, which is the faster one at such sizes. Counted and judged: target forwards under full acceptance.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from transformers import AutoModelForCausalLM, GenerationConfig

from harness.contract import DrafterSetup, EngineSetup, Request, Run, SamplingParams
from harness.engines import engine_factory
from harness.engines.vllm import RECIPE, VllmFactory
from harness.known_answer import FAMILIES, build
from harness.trained import checkpoints, text
from harness.workloads.random_checkpoints import random_checkpoint
from reference_engine import EngineConfig, LLMEngine
from reference_engine import SamplingParams as EngineSamplingParams
from suites.registration import suite

suite(seconds=90, stage="bench", needs="cpu")

pytestmark = pytest.mark.perf

BATCH, PROMPT_LEN, NUM_TOKENS, ROUNDS = 8, 16, 128, 5
CONTEXT = PROMPT_LEN + NUM_TOKENS

LEAST = {"transformers": 1.3, "vllm": 0.7}
"""Tokens per second over those of others that the trained target must reach, on as many threads. docs/perf.md has what
it does reach, and the noise."""

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Measured:
    """A target, its prompts, of equal lengths so that transformers needs no padding, and how many threads all get."""

    folder: Path
    prompts: Tokens
    threads: int = 1


TRAINED = [("trained", threads) for threads in (1, 2)]
"""4.2 MB of weights."""
OTHERS = [(name, 1) for name in ("law", "walk", "census", "random llama 4 x 256")]
"""Known-answer targets with 0.1, 1.3 and 3.9 MB of weights, and one of 15 MB."""


@pytest.fixture(scope="module", params=TRAINED + OTHERS, ids=lambda param: f"{param[0]}, {param[1]} thread(s)")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    name, threads = request.param
    if name == "trained":
        held_out = text.prompts(BATCH, shortest=PROMPT_LEN, longest=PROMPT_LEN)
        return Measured(checkpoints.WEIGHTS / "target", [list(ids) for ids in held_out], threads)
    directory = tmp_path_factory.mktemp("perf")
    if name in FAMILIES:
        (folder,) = build(directory, [name])
        return Measured(folder / "target", prompts(), threads)
    return Measured(_random(directory), prompts(), threads)


def _random(directory: Path) -> Path:
    return random_checkpoint(
        directory,
        seed=0,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        initializer_range=0.12,
    )


def prompts() -> Tokens:
    """Of ids that every known-answer checkpoint has."""
    rng = random.Random(0)
    return [[rng.randrange(3, 16) for _ in range(PROMPT_LEN)] for _ in range(BATCH)]


def reference(measured: Measured, *, compiled: bool) -> Callable[[], Tokens]:
    """Neither traces nor poison, and no prefix cache: later rounds must not profit from earlier ones."""
    config = EngineConfig(
        model=measured.folder, context_length=CONTEXT, max_running=BATCH, prefix_cache=False, compile=compiled
    )
    engine = LLMEngine(config)
    params = EngineSamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)

    def run() -> Tokens:
        tokens: dict[str, list[int]] = {str(index): [] for index in range(BATCH)}
        for index, prompt in enumerate(measured.prompts):
            engine.add_request(str(index), prompt, params)
        while engine.has_unfinished:
            for output in engine.step().outputs:
                tokens[output.request_id] += output.token_ids
        return list(tokens.values())

    return run


def fastest_generate(measured: Measured) -> tuple[str, Callable[[], Tokens]]:
    """transformers with whichever of its caches is faster here."""
    model: Any = AutoModelForCausalLM.from_pretrained(measured.folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()
    input_ids = torch.tensor(measured.prompts)
    mask = torch.ones_like(input_ids)

    def run(cache: str) -> Tokens:
        config = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, cache_implementation=cache)
        with torch.inference_mode():
            output = model.generate(input_ids, attention_mask=mask, generation_config=config)
        return [row[PROMPT_LEN:] for row in output.tolist()]

    ways = {cache: partial(run, cache) for cache in ("dynamic", "static")}
    best = min(ways, key=lambda cache: min(seconds(ways[cache]) for _ in range(2)))
    return best, ways[best]


def vllm(measured: Measured) -> Callable[[], Tokens]:
    """vLLM without speculation, in its own process. What goes over the pipe is a batch of token ids."""
    setup = EngineSetup(target=measured.folder, context_length=CONTEXT, max_running=BATCH, prefix_cache=False)
    engine = VllmFactory(threads=measured.threads).start(setup)
    asked = requests(measured.prompts, NUM_TOKENS)

    def run() -> Tokens:
        return [list(done.token_ids) for done in engine.run(asked).completions]

    return run


def requests(prompts: Tokens, num_tokens: int) -> list[Request]:
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    return [Request(request_id=str(i), prompt_token_ids=tuple(p), sampling=params) for i, p in enumerate(prompts)]


def others(measured: Measured) -> dict[str, Callable[[], Tokens]]:
    """What the reference engine is held against here."""
    cache, transformers = fastest_generate(measured)
    found = {f"transformers ({cache} cache)": transformers}
    if RECIPE.version in RECIPE.installed():
        found["vllm"] = vllm(measured)
    return found


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_throughput(
    benchmark: BenchmarkFixture,
    measured: Measured,
    compiled: bool,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.set_num_threads(measured.threads)
    ours = reference(measured, compiled=compiled)
    rivals = others(measured)
    for theirs in rivals.values():
        assert ours() == theirs()
    taken: dict[str, list[float]] = {name: [] for name in rivals}

    def their_turn() -> None:
        for name, theirs in rivals.items():
            taken[name].append(seconds(theirs))

    # The others run as the set-up of each round: their time is taken between two of ours.
    benchmark.pedantic(ours, setup=their_turn, rounds=ROUNDS, iterations=1)
    total, own = BATCH * NUM_TOKENS, benchmark.stats.stats.median
    ratios = {name: statistics.median(times) / own for name, times in taken.items()}
    rates = {name: total / statistics.median(times) for name, times in taken.items()}
    benchmark.extra_info.update(tokens_per_second={"reference": total / own, **rates}, ratios=ratios)
    told = ", ".join(f"{name} {rate:.0f} ({ratios[name]:.2f} x)" for name, rate in rates.items())
    with capsys.disabled():
        sys.stdout.write(f"\n{request.node.callspec.id}: reference {total / own:.0f} tokens/s, {told}\n")
    if measured.folder == checkpoints.WEIGHTS / "target" and not compiled:
        for name, ratio in ratios.items():
            assert ratio >= LEAST[name.partition(" ")[0]], f"{name}: {ratio:.2f} x"


def target_forwards(run: Run) -> tuple[int, int]:
    """(in prefill steps, in decode steps)."""
    prefill = sum(step.target_forwards for step in run.steps if step.kind == "extend")
    return prefill, sum(step.target_forwards for step in run.steps) - prefill


@pytest.mark.parametrize("k", [1, 3, 7])
def test_target_forwards_at_full_acceptance(tmp_path: Path, k: int) -> None:
    """128 tokens after the one that the prefill gives: k + 1 of them for each target forward instead of one."""
    (folder,) = build(tmp_path, ["walk-perfect"])
    asked = requests(prompts(), 1 + NUM_TOKENS)
    runs = [
        engine_factory("reference").start(EngineSetup(target=folder / "target", drafter=drafter)).run(asked)
        for drafter in (None, DrafterSetup.chain("STANDALONE", k, folder / "standalone"))
    ]
    plain, speculative = (target_forwards(run) for run in runs)
    assert [done.token_ids for done in runs[0].completions] == [done.token_ids for done in runs[1].completions]
    assert speculative[0] == plain[0] == 1
    assert plain[1] == NUM_TOKENS
    assert speculative[1] <= plain[1] // (k + 1)
