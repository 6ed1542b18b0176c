"""A drafter that is the target is accepted whole by the reference engine, however many ragged requests share a step.

What a drafter writes beyond a request's own pages lands in the null page, where requests of one step overwrite each
other's drafts; nothing but the acceptance of such steps shows it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from harness.contract import DrafterSetup, EngineSetup, Request, SamplingParams
from harness.engines import engine_factory
from harness.workloads.random_checkpoints import VOCAB_SIZE, random_checkpoint
from suites.registration import suite

suite(seconds=1.1, stage="cpu", needs="cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("target"), seed=0)


def ragged(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 40))) for _ in range(count)]
    return [Request(request_id=str(i), prompt_token_ids=prompt, sampling=params) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("k", "page_size"), [(1, 4), (3, 16), (5, 4)])
def test_every_draft_is_accepted(target: Path, k: int, page_size: int, overlap: bool) -> None:
    drafter = DrafterSetup.chain("STANDALONE", k, target)
    setup = EngineSetup(
        target=target, drafter=drafter, dtype="float64", max_running=24, page_size=page_size, overlap=overlap
    )
    run = engine_factory("reference").start(setup).run(ragged(seed=1, count=24))
    short = {done.request_id: done.accept_lens for done in run.completions if set(done.accept_lens or ()) != {k + 1}}
    assert not short
