"""One engine, two backends: Triton kernels give what their torch references give, whoever drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from harness.contract import Request, Run, SamplingParams
from harness.engines.reference import ReferenceEngine
from harness.invariants import check, equal_2
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from reference_engine import EngineConfig
from suites.kernels.interpreter import INSTALLED
from suites.reference_engine.conftest import OpenLane
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=2, stage="cpu", needs="cpu")

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INSTALLED, reason="Triton is not installed here, so there is one backend only"),
]

TOLERANCE = 1e-5
"""Of logprobs and hidden rows: attention adds up in another order."""

PENALISED = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "min_new_tokens": 2}
FILTERED = {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "seed": 7}
MIXED: tuple[dict[str, Any], ...] = ({"logprobs": 3, "prompt_logprobs": 1}, PENALISED, FILTERED | {"logprobs": 2})


def mixed(family_vocab: int) -> list[Request]:
    """Greedy, penalised and sampled requests of ragged lengths in one batch."""
    prompts = [[3 + (7 * i + 5 * j) % (family_vocab - 3) for j in range(2 + 2 * i)] for i in range(len(MIXED))]
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_new_tokens=3 - (i > 0), ignore_eos=True, **MIXED[i]),
            return_hidden_states=i == 0,
        )
        for i, prompt in enumerate(prompts)
    ]


def run(lane: Lane, kernels: str, requests: Sequence[Request]) -> Run:
    with lane.start(family="law", k=2, kernels=kernels, page_size=4, chunk_size=6, overlap=True) as engine:
        assert isinstance(engine, ReferenceEngine)
        assert engine.engine.config.backend == kernels
        return engine.run(requests)


@pytest.mark.parametrize("name", tiered(LANES, "EAGLE-tree"))
def test_kernels_and_references_agree(open_lane: OpenLane, name: str) -> None:
    lane = open_lane(name)
    requests = mixed(16)
    torch_run, triton_run = (run(lane, kernels, requests) for kernels in ("torch", "triton"))
    check(equal_2(triton_run, torch_run, accept_lens=lane.speculative, seeded=True, name="torch"))
    for got, right in zip(triton_run.completions, torch_run.completions, strict=True):
        for mine, other in zip(got.logprobs or (), right.logprobs or (), strict=True):
            assert (mine.token_id, mine.rank) == (other.token_id, other.rank)
            assert mine.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]


def test_two_ways_of_fewer_steps_do_not_go_together(open_lane: OpenLane) -> None:
    target = open_lane("none").setup(family="law").target
    with pytest.raises(ValueError, match="compile=True: needs kernels='torch'"):
        EngineConfig(model=target, compile=True, kernels="triton")
    with pytest.raises(ValueError, match="kernels='cuda': must be"):
        EngineConfig(model=target, kernels="cuda")  # type: ignore[arg-type]
