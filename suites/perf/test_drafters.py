"""Each drafter on each checkpoint, against the same engine without one: runs take turns in one process."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ci.perf import engines
from ci.perf.checkpoints import CHECKPOINTS
from harness.workloads.lanes import LANES
from reference_engine import LLMEngine
from suites.registration import suite

suite(seconds=90, stage="bench", needs="cpu")

pytestmark = pytest.mark.perf

TOKENS, ROUNDS = 48, 5
BATCHES = (1, 8)
CASES = [(name, lane) for name, one in CHECKPOINTS.items() for lane in one.lanes if LANES[lane].speculative]


@dataclass(slots=True)
class Watch:
    """Runs of one engine. `steps`: seconds of each step; `gaps`: seconds before each token, a block's shared out evenly
    among its tokens; `seconds`: of each run."""

    engine: LLMEngine
    batch: int
    steps: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self) -> dict[str, list[int]]:
        """Tokens by request."""
        made: dict[str, list[int]] = {str(row): [] for row in range(self.batch)}
        started = before = time.perf_counter()
        delivered = dict.fromkeys(made, started)
        for step in engines.steps(self.engine, self.batch, TOKENS):
            now = time.perf_counter()
            self.steps.append(now - before)
            before = now
            for output in step.outputs:
                ids = output.token_ids
                if made[output.request_id] and ids:
                    self.gaps += [(now - delivered[output.request_id]) / len(ids)] * len(ids)
                made[output.request_id] += ids
                delivered[output.request_id] = now
        self.seconds.append(before - started)
        return made

    def figures(self) -> dict[str, float]:
        p50, p95 = np.percentile(self.gaps, (50, 95))
        return {
            "tokens_per_second": self.batch * TOKENS / float(np.median(self.seconds)),
            "ms_per_step": 1e3 * float(np.median(self.steps)),
            "inter_token_ms_p50": 1e3 * float(p50),
            "inter_token_ms_p95": 1e3 * float(p95),
        }


def accept_length(engine: LLMEngine) -> float:
    """Tokens of a verify step, the bonus included; 1 where nothing was drafted."""
    stats = engine.processor.stats
    return 1 + stats.num_accepted_tokens / max(stats.num_drafts, 1)


@pytest.mark.parametrize(
    ("checkpoint", "drafter", "batch"), [(*case, batch) for case, batch in product(CASES, BATCHES)]
)
def test_drafter(
    benchmark: BenchmarkFixture,
    folders: dict[str, Path],
    checkpoint: str,
    drafter: str,
    batch: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.set_num_threads(1)
    with_drafts, without = (
        Watch(engines.start(folders[checkpoint], drafter, batch, drafting=drafting), batch)
        for drafting in (True, False)
    )
    assert with_drafts.run() == without.run()
    with_drafts.seconds.clear()
    without.seconds.clear()
    # The engine without a drafter runs as the set-up of each round: its time is taken between two of the other's.
    benchmark.pedantic(with_drafts.run, setup=lambda: (without.run(), None)[1], rounds=ROUNDS, iterations=1)
    speed_up = float(np.median(np.array(without.seconds) / np.array(with_drafts.seconds)))
    figures = {**with_drafts.figures(), "speed_up": speed_up, "accept_length": accept_length(with_drafts.engine)}
    benchmark.extra_info.update(figures, without=without.figures())
    with capsys.disabled():
        told = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
        sys.stdout.write(f"\n{checkpoint} {drafter} batch {batch}: {told}\n")
