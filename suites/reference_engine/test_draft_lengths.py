"""Fewer steps are fewer forwards and narrower windows, and a drafter writes nothing past its last position."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.contract import Action, Refused, StepTrace
from harness.engines.reference import ReferenceEngine
from harness.invariants import accept_1, check, equal_1, state_1
from harness.workloads.acceptance import deserved, deserved_drafts
from harness.workloads.lane import Lane
from harness.workloads.lanes import DrafterLane
from harness.workloads.scenarios import mixed_flags, plain
from reference_engine import LLMEngine, SpecConfig
from reference_engine.batch import Batch
from reference_engine.cache.kv import POISON
from reference_engine.draft_plan import DraftPlan, plan_drafts
from reference_engine.request import RequestState, SamplingParams
from suites.conformance.arrange import WALK
from suites.reference_engine.conftest import OpenLane
from suites.reference_engine.support import ask, drawn
from suites.registration import suite

suite(seconds=2.5, stage="cpu", needs="cpu")

K = 4
CHAIN = SpecConfig(method="EAGLE", num_steps=K, num_draft_tokens=K + 1)
TREE = SpecConfig(method="EAGLE", num_steps=3, topk=2, num_draft_tokens=8)


def setting(*changes: tuple[int, int]) -> tuple[Action, ...]:
    return tuple(Action(step=step, name="set_num_steps", value=k) for step, k in changes)


def batch(*requests: tuple[int, int | None], ends: tuple[bool, ...] = ()) -> Batch:
    """Requests of (committed tokens, own limit) with one launch on its way; `ends` makes it a prefill."""
    made = []
    for place, (tokens, limit) in enumerate(requests):
        request = RequestState(f"r{place}", 0, (1,) * tokens, SamplingParams(), False, seed=0, arrival=place)
        request.num_speculative_tokens, request.pending_emits = limit, 1
        made.append(request)
    return Batch("extend" if ends else "decode", made, ends_prefill=list(ends))


@pytest.mark.parametrize(
    ("spec", "given", "num_steps", "plan", "columns"),
    [
        (CHAIN, batch((5, None), (9, None)), 4, DraftPlan(4, 4, [4, 4]), [4, 4]),
        (CHAIN, batch((5, None), (9, 2), (9, 0)), 4, DraftPlan(4, 4, [4, 2, 0]), [4, 2, 0]),
        (CHAIN, batch((5, 1), (9, 2)), 4, DraftPlan(2, 2, [1, 2]), [1, 2]),
        (CHAIN, batch((5, None), (9, 9)), 3, DraftPlan(3, 3, [3, 3]), [3, 3]),
        (CHAIN, batch((5, None), (9, 1)), 0, DraftPlan(0, 0, [0, 0]), [0, 0]),
        (CHAIN, batch((46, None), (48, None), (49, None), (60, 3)), 4, DraftPlan(3, 3, [3, 3, 0, 0]), [3, 1, 0, 0]),
        (CHAIN, batch((5, None), (9, 2), ends=(False, True)), 4, DraftPlan(2, 2, [0, 2]), [0, 2]),
        (CHAIN, batch((5, None), (9, 2), ends=(False, False)), 4, DraftPlan(4, 4, [0, 0]), [0, 0]),
        (TREE, batch((5, None), (9, 3), (9, 0)), 3, DraftPlan(3, 7, [7, 3, 0]), [7, 7, 0]),
        (TREE, batch((5, None), (9, 3)), 1, DraftPlan(1, 2, [2, 2]), [2, 2]),
        (TREE, batch((5, 1), (9, 2)), 3, DraftPlan(2, 6, [1, 2]), [6, 6]),
    ],
)
def test_plans(spec: SpecConfig, given: Batch, num_steps: int, plan: DraftPlan, columns: list[int]) -> None:
    assert plan_drafts(given, spec, num_steps, max_tokens=50) == plan
    assert [request.num_drafts for request in given.requests] == columns


@pytest.mark.parametrize("name", ["STANDALONE", "EAGLE", "EAGLE3", "MTP", "EAGLE-tree", "NGRAM"])
def test_fewer_steps_cost_less(open_lane: OpenLane, name: str) -> None:
    lane = open_lane(name)
    spec = lane.setup(k=K).drafter
    assert spec is not None
    schedule = setting((0, K), (2, 2), (3, 0), (5, 1), (6, 3))
    run = lane.run([ask("a", max_new_tokens=30)], k=K, actions=schedule)
    nodes = {k: min(spec.num_draft_tokens - 1, spec.topk + (k - 1) * spec.topk**2) if k else 0 for k in range(K + 1)}
    drafted = [nodes[run.num_steps_at(step.step)] for step in run.steps]
    for step, width in zip(run.steps[1:], drafted, strict=False):
        assert step.verify is not None
        assert step.verify.num_draft_tokens == 1 + width
        expected = 0 if name == "NGRAM" else max(run.num_steps_at(step.step), 1)
        assert step.draft_forwards == expected, f"step {step.step}"
    assert {0, nodes[1], nodes[K]} <= set(drafted)


def test_fewer_steps_than_layers(tmp_path: Path) -> None:
    """The KV of every layer is kept exact, whatever is drafted."""
    lane = Lane("reference", DrafterLane(name="mtp3", method="MTP", folder="mtp3", within_target=True), tmp_path)
    requests = plain(WALK, (3, 1, 6), (14, 12, 13))
    run = lane.run(requests, k=K, actions=setting((1, 2), (2, 0), (4, 1), (6, K), (8, 3)), snapshots=True)
    drafter = lane.drafter(WALK.family)
    check(accept_1(run, deserved(run, drafter), deserved_drafts(run, drafter)))
    with lane.start(k=K) as engine:
        check(state_1(run, engine.fresh_state))


@pytest.mark.parametrize("name", ["STANDALONE", "EAGLE-tree"])
def test_penalties_in_windows_of_any_width(open_lane: OpenLane, name: str) -> None:
    """All flags, while the steps change: the choice depends on what was emitted before, inside a window too."""
    lane, flagged = open_lane(name), mixed_flags(WALK)
    requests = [request for request in flagged.requests if request.sampling.temperature == 0]
    run = lane.run(requests, k=K, actions=setting((2, 1), (4, 0), (6, 3)), **flagged.setup)
    check(equal_1(run, lane.baseline(requests, k=K, **flagged.setup)))


@pytest.mark.parametrize("name", ["STANDALONE", "EAGLE-tree"])
def test_a_sampled_request_without_drafts_is_that_without_a_drafter(open_lane: OpenLane, name: str) -> None:
    """Its random numbers are those of its positions, in windows as wide as a neighbour's drafts, or of one token."""
    lane = open_lane(name)
    asked = [ask(f"r{i}", temperature=1.0, seed=i, max_new_tokens=12, presence_penalty=0.5) for i in range(2)]
    silent = [replace(request, num_speculative_tokens=0) for request in asked]
    plain_run = lane.baseline(asked, family="law")
    setup = lane.setup(family="law", k=K)
    for batch_, actions in ((silent, ()), ([silent[0], asked[1]], ()), (asked, setting((0, 0)))):
        method = "greedy" if name == "EAGLE-tree" else "probabilistic"
        with lane.start_setup(drawn(setup, method)) as engine:
            run = engine.run(batch_, actions=actions)
        alone = [r.request_id for r in batch_ if r.num_speculative_tokens == 0 or actions]
        assert [run.of(name).token_ids for name in alone] == [plain_run.of(name).token_ids for name in alone]


def test_what_cannot_be_set_is_refused(open_lane: OpenLane) -> None:
    lane = open_lane("EAGLE")
    with lane.start(k=3) as engine, pytest.raises(ValueError, match=r"num_steps=4: must lie in 0\.\.3"):
        engine.run([ask()], actions=setting((0, 4)))
    with (
        open_lane("none").start() as engine,
        pytest.raises(Refused, match="set_num_steps: there is nothing"),
    ):
        engine.run([ask()], actions=setting((0, 1)))
    with lane.start() as engine:
        assert isinstance(engine, ReferenceEngine)
        inner: LLMEngine = engine.engine
        with pytest.raises(ValueError, match="num_speculative_tokens=-1: must be None"):
            inner.add_request("a", (3, 4), num_speculative_tokens=-1)
        assert not inner.has_unfinished


@pytest.mark.parametrize("name", ["STANDALONE", "EAGLE", "EAGLE3", "EAGLE-tree"])
def test_no_draft_kv_past_the_drafters_last_position(open_lane: OpenLane, name: str, tmp_path: Path) -> None:
    """Every slot of the drafter's cache that belongs to a position it has not got stays as poisoned as it began, from
    prompts that end before it, at it, and after it."""
    limit, lane = 12, open_lane(name)
    setup = lane.setup(k=K, page_size=1, chunk_size=5, prefix_cache=False)
    assert setup.drafter is not None
    assert setup.drafter.model is not None
    shutil.copytree(setup.drafter.model, tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": limit}))
    written: list[int] = []
    with lane.start_setup(replace(setup, drafter=replace(setup.drafter, model=tmp_path / "short"))) as engine:
        assert isinstance(engine, ReferenceEngine)
        inner = engine.engine
        drafter = inner.drafter
        assert drafter is not None
        (cache,) = drafter.caches()

        def look(_: StepTrace) -> None:
            for request in inner.scheduler.running:
                rows = cache.read(inner.pool.block_table[request.row]).flatten(1)
                mine = (rows != POISON).any(1)[: len(request.pages)]
                written.extend(mine.nonzero().flatten().tolist())

        requests = plain(WALK, (3, limit - 2, limit, limit + 6), (16, 9, 7, 5))
        run: Any = engine.run(requests, on_step=look)
    # Scratch of a tree takes more slots than positions; a chain takes one for each.
    assert max(written) == limit - 1 if lane.spec.topk == 1 else max(written) < limit + lane.spec.topk * K
    assert len({done.finish_reason for done in run.completions}) == 1
