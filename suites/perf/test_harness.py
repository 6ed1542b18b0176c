"""What checking costs: every invariant that one recorded run offers observations for."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ci.perf import engines
from harness.contract import EngineSetup, Request, SamplingParams
from harness.engines import engine_factory
from harness.invariants import applicable, judge
from harness.workloads.lanes import LANES
from suites.registration import suite

suite(seconds=30, stage="bench", needs="cpu")

pytestmark = pytest.mark.perf

BATCH, TOKENS = 8, 64


@pytest.mark.parametrize("drafter", [name for name, spec in LANES.items() if not spec.scripted])
def test_checks(
    benchmark: BenchmarkFixture, folders: dict[str, Path], drafter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, spec = folders["walk"], LANES[drafter]
    setup = EngineSetup(
        target=folder / spec.target_folder(),
        drafter=spec.drafter(engines.NUM_STEPS, folder, None),
        context_length=engines.CONTEXT,
    )
    sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, logprobs=1)
    requests = [
        Request(request_id=str(row), prompt_token_ids=tuple(prompt), sampling=sampling, return_hidden_states=True)
        for row, prompt in enumerate(engines.prompts(BATCH))
    ]
    engine = engine_factory("reference").start(setup)
    start = time.perf_counter()
    run = engine.run(requests)
    generating = time.perf_counter() - start
    assert judge(run) == []
    benchmark.pedantic(judge, args=(run,), rounds=5, iterations=1)
    thousands = BATCH * TOKENS / 1000
    figures = {
        "seconds_per_1000_tokens": benchmark.stats.stats.median / thousands,
        "generating_1000_tokens": generating / thousands,
    }
    benchmark.extra_info.update(figures, checks=len(list(applicable(run))))
    with capsys.disabled():
        sys.stdout.write(f"\n{drafter}: {', '.join(f'{name} {value:.3f}' for name, value in figures.items())}\n")
