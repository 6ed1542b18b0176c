"""Recorded passes: the bookkeeping around CUDA graphs, on a recorder that calls the work again instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.contract import Request, SamplingParams
from harness.engines.reference import ReferenceEngine
from harness.invariants import check, equal_2
from harness.workloads.lane import Lane
from reference_engine import EngineConfig
from reference_engine.decode_pass import GraphedPass, Recorded, TargetPass, page_bucket
from suites.reference_engine.conftest import OpenLane
from suites.registration import suite

suite(seconds=0.5, stage="cpu", needs="cpu")

TENSORS = ("token_ids", "draft_tokens", "cache_positions", "hidden", "aux", "logits")


class Recorder:
    """As a CUDA graph does, writes the results of every replay into the same memory."""

    def __init__(self) -> None:
        self.recordings = 0

    def __call__(self, work: Callable[[], TargetPass]) -> Recorded:
        self.recordings += 1
        results = work().clone()

        def replay() -> None:
            fresh = work()
            for name in TENSORS:
                if getattr(results, name) is not None:
                    getattr(results, name).copy_(getattr(fresh, name))

        return replay, results


def requests() -> list[Request]:
    """Ragged, so that the batch shrinks through its buckets."""
    return [
        Request(
            request_id=f"r{index}",
            prompt_token_ids=tuple(range(3, 6 + index)),
            sampling=SamplingParams(max_new_tokens=5 + 6 * index, ignore_eos=True),
        )
        for index in range(4)
    ]


def graphed(lane: Lane, recorder: Recorder) -> ReferenceEngine:
    engine = ReferenceEngine(lane.setup(family="law", overlap=True, batch_buckets=(1, 2, 4, 8)))
    runner = engine.engine.runner
    runner._decode_pass = GraphedPass(runner._decode_pass, recorder)
    return engine


@pytest.mark.parametrize("name", ["none", "STANDALONE", "EAGLE3", "EAGLE-tree"])
def test_replays_give_what_launches_give(open_lane: OpenLane, name: str) -> None:
    """Later launches of a shape read their own rows and trees, and results outlive the next replay."""
    lane, recorder = open_lane(name), Recorder()
    replayed = graphed(lane, recorder).run(requests())
    with lane.start(family="law", overlap=True, batch_buckets=(1, 2, 4, 8)) as engine:
        check(equal_2(replayed, engine.run(requests()), accept_lens=lane.speculative, name="launched"))
    decodes = sum(step.kind == "decode" for step in replayed.steps)
    assert 1 < recorder.recordings < decodes


def test_pages_come_in_doublings() -> None:
    assert [page_bucket(pages, 11) for pages in (1, 2, 3, 5, 8, 9, 11)] == [1, 2, 4, 8, 8, 11, 11]


def test_cuda_graphs_need_cuda(open_lane: OpenLane) -> None:
    target = open_lane("none").setup(family="law").target
    with pytest.raises(ValueError, match="cuda_graphs=True: needs a CUDA device, not 'cpu'"):
        EngineConfig(model=target, cuda_graphs=True)
