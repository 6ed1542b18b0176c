"""What is timed. A benchmark is a function from the checkpoints' folders to some work; to add one, a line in `_all`.

This file is imported once for each source tree that is measured, and then finds the engine of that tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ci.gpu_cases import CASES, Sizes
from ci.perf import engines
from ci.perf.checkpoints import CHECKPOINTS
from harness.contract import EngineSetup, Request, SamplingParams
from harness.engines import engine_factory
from harness.invariants import applicable
from harness.workloads.lanes import LANES
from kernels import KERNELS

Work = Callable[[], Iterator[object]]
"""Does its work in slices of about a millisecond: two source trees take turns between them."""
Folders = Mapping[str, Path]

CONTROL = "control"
"""The benchmark that no source of ours takes part in."""
BATCH, TOKENS = 4, 6
KERNEL_SIZES = Sizes(batch=4, k=3, vocab=1000, hidden=64, context=512)
CHECKED_TOKENS = 16
CALLS = 8
"""Of a kernel in a slice: one call takes a tenth of a millisecond."""
NOT_TIMED = ("paged_attention",)
"""Kernels whose reference waits for memory: the neighbours of this machine decide how long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """`prepare` may take its time: the work that it returns is done again and again. `tokens`: what is generated or
    checked each time, 0 where that has no meaning."""

    name: str
    prepare: Callable[[Folders], Work]
    tokens: int = 0


def _engine(checkpoint: str, lane: str, batch: int, tokens: int, folders: Folders) -> Work:
    engine = engines.start(folders[checkpoint], lane, batch)
    return partial(engines.steps, engine, batch, tokens)


def _kernels(names: Sequence[str], _folders: Folders) -> Work:
    """Some kernels, one after another, by their torch references: alone most are too short to be timed well."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        work = [(KERNELS[name].call, CASES[name].build(KERNEL_SIZES, torch.device("cpu"))) for name in names]

    def run() -> Iterator[object]:
        for call, given in work:
            for _ in range(CALLS):
                result = call(*given.args, **given.kwargs, backend="torch")
            yield result

    return run


def _checks(lane: str, folders: Folders) -> Work:
    """Every invariant that one recorded run offers observations for."""
    folder, spec = folders["walk"], LANES[lane]
    setup = EngineSetup(
        target=folder / spec.target_folder(),
        drafter=spec.drafter(engines.NUM_STEPS, folder, None),
        context_length=engines.CONTEXT,
        kernels="torch",
    )
    sampling = SamplingParams(max_new_tokens=CHECKED_TOKENS, ignore_eos=True, logprobs=1)
    requests = [
        Request(request_id=str(row), prompt_token_ids=tuple(prompt), sampling=sampling, return_hidden_states=True)
        for row, prompt in enumerate(engines.prompts(BATCH))
    ]
    run = engine_factory("reference").start(setup).run(requests)

    def check() -> Iterator[object]:
        for _, one in applicable(run):
            yield one.function(run)

    return check


def _control(_folders: Folders) -> Work:
    """What an engine's step is made of, without an engine: small matrix products and much dispatch."""
    weights = [torch.full((64, 64), 1 / 64) for _ in range(4)]

    def work() -> Iterator[object]:
        for _ in range(4):
            rows = torch.ones(4, 64)
            for _ in range(25):
                for weight in weights:
                    rows = torch.nn.functional.silu(rows @ weight) + rows
                rows = rows.index_select(0, torch.arange(4)) / rows.amax()
            yield rows

    return work


def kernel_group(name: str) -> str:
    """Kernels of one group are timed together."""
    if name.startswith("verify"):
        return "verification"
    return "vocabulary" if CASES[name].uses_vocab else "bookkeeping"


def _generation(checkpoint: str, lane: str, batch: int, tokens: int) -> Benchmark:
    prepare = partial(_engine, checkpoint, lane, batch, tokens)
    return Benchmark(name=f"engine/{checkpoint}/{lane}", prepare=prepare, tokens=batch * tokens)


def _all() -> Iterator[Benchmark]:
    yield Benchmark(name=CONTROL, prepare=_control)
    walk = CHECKPOINTS["walk"]
    for lane in walk.lanes:
        yield _generation("walk", lane, BATCH, TOKENS)
    yield _generation("random", "none", 8, 4)
    for lane in ("none", "EAGLE3"):
        yield Benchmark(name=f"harness/judge/{lane}", prepare=partial(_checks, lane), tokens=BATCH * CHECKED_TOKENS)
    for group in dict.fromkeys(map(kernel_group, CASES)):
        names = [name for name in CASES if kernel_group(name) == group and name not in NOT_TIMED]
        yield Benchmark(name=f"kernels/{group}", prepare=partial(_kernels, names))


BENCHMARKS = {one.name: one for one in _all()}
