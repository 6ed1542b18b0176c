"""Draft lengths that change from step to step and differ from request to request, and the ends of the contexts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.contract import Action, DrafterSetup, Request, Run
from harness.invariants import (
    Violation,
    accept_1,
    accept_2_drift,
    count_2,
    count_2_blocks,
    equal_1,
    kv_1,
    shape_1,
    shape_2,
    state_1,
)
from harness.workloads.acceptance import deserved, deserved_drafts
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane, step_bound
from harness.workloads.lanes import LANES
from harness.workloads.scenarios import one_token, plain
from harness.workloads.vocabulary import Vocabulary
from suites.conformance.arrange import ROWS, WALK
from suites.registration import suite

suite(seconds=2.6, stage="cpu", needs="cpu")

SPECULATIVE = [name for name, spec in LANES.items() if spec.speculative]
CHAINS = [name for name in SPECULATIVE if LANES[name].topk == 1]
OWN_POSITIONS = [name for name, spec in LANES.items() if spec.loads_checkpoint and spec.own_positions]
K, ARRIVAL = 4, 3
LIMIT = 20
"""Positions that a drafter has whose context ends before that of its target."""

pytestmark = pytest.mark.drafters(*SPECULATIVE)


def changing(lane: Lane, *changes: tuple[int, int]) -> tuple[Action, ...]:
    """(step, steps to draft from then on), as far as the lane's drafter goes."""
    most = lane.spec.max_k or K
    return tuple(Action(step=step, name="set_num_steps", value=min(k, most)) for step, k in changes)


def down_and_up(lane: Lane) -> tuple[Action, ...]:
    """Shorter, none, all while a request arrives among those without drafts, none for a while, and so on."""
    return changing(lane, (1, 1), (2, 0), (ARRIVAL, K), (5, 0), (7, 2), (8, 1))


def bare(words: Vocabulary) -> tuple[Request, ...]:
    requests = plain(words, (1, 2, 5, 11, 21), (14, 11, 16, 13, 12))
    return (*requests[:-1], replace(requests[-1], arrival_step=ARRIVAL))


def words_of(lane: Lane, suffix: str = "") -> Vocabulary:
    """Which nodes a tree keeps hangs on probabilities, some of which are exactly equal in the more telling family."""
    return vocabulary((ROWS if lane.spec.name in CHAINS else WALK).family + suffix)


def deserves(lane: Lane, run: Run, family: str, max_tokens: int | None = None) -> list[Violation]:
    drafter = lane.drafter(family)
    drafted = deserved_drafts(run, drafter, max_tokens) if lane.spec.topk == 1 else None
    return accept_1(run, deserved(run, drafter, max_tokens), drafted)


@pytest.mark.invariant("ACCEPT-1", "EQUAL-1", "SHAPE-1", "SHAPE-2", "COUNT-2", "KV-1")
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.full), True])
def test_steps_that_change(lane: Lane, overlap: bool) -> None:
    lane.grey_box()
    words = words_of(lane)
    requests = bare(words)
    setup = {"family": words.family, "k": K, "overlap": overlap, "page_size": 4}
    run = lane.run(requests, actions=down_and_up(lane), **setup)
    widths = {step.verify.num_draft_tokens for step in run.steps if step.verify is not None}
    assert 1 in widths, "no window was without drafts"
    lane.check(deserves(lane, run, words.family) + equal_1(run, lane.baseline(requests, **setup)))
    lane.check(shape_1(run) + shape_2(run) + count_2(run) + count_2_blocks(run) + kv_1(run))


@pytest.mark.invariant("ACCEPT-2")
def test_acceptance_is_the_same_after_steps_without_drafts(lane: Lane) -> None:
    """Before, during and after, on one engine. The drafter is always right, so that k + 1 steps without drafts are as
    long as one block, and blocks begin at the same tokens again."""
    lane.grey_box()
    lane.needs("set_num_steps")
    k = lane.spec.max_k or K
    words = words_of(lane, "-perfect") if lane.spec.may_equal_target else WALK
    requests = plain(words, (3, 7), (5 * k + 8, 5 * k + 6))
    if not lane.spec.may_equal_target:
        lane.needs("logit_bias")
        requests = one_token(words, k).requests[-2:]
    pause = changing(lane, (2, 0), (2 + k + 1, K))
    with lane.start(family=words.family, k=k, page_size=4) as engine:
        runs = [engine.run(requests, actions=actions, max_steps=step_bound(requests)) for actions in ((), pause, ())]
    lane.check(accept_2_drift(runs[:2], by_position=True) + accept_2_drift([runs[0], runs[2]]))
    silent = [step.step for step in runs[1].steps if step.verify is not None and step.verify.num_draft_tokens == 1]
    assert silent == list(range(3, 3 + k + 1)) < [runs[1].steps[-1].step], "nothing was drafted after the pause"


@pytest.mark.invariant("ACCEPT-1", "EQUAL-1")
def test_the_length_is_kept_over_a_sleep(lane: Lane) -> None:
    """Set before, and while the engine is asleep."""
    lane.grey_box()
    lane.needs("set_num_steps", "sleep", "wake")
    words = words_of(lane)
    requests = plain(words, (2, 5), (12, 14))
    for asleep in (False, True):
        sleep: tuple[Action, ...] = (Action(step=0, name="sleep"), Action(step=1, name="wake"))
        actions = sorted((*sleep, *changing(lane, (int(asleep), 0 if lane.spec.max_k else 2))), key=lambda a: a.step)
        run = lane.run(requests, actions=actions, family=words.family, k=K)
        lane.check(deserves(lane, run, words.family) + equal_1(run, lane.baseline(requests, family=words.family)))


@pytest.mark.invariant("STATE-1")
def test_state_after_steps_without_drafts(lane: Lane) -> None:
    lane.grey_box()
    requests = plain(ROWS, (3, 6), (9, 8))
    setup: dict[str, Any] = {"family": ROWS.family, "k": K}
    run = lane.run(requests, actions=changing(lane, (1, 0), (3, K), (4, 1)), snapshots=True, **setup)
    with lane.start(**setup) as engine:
        lane.check(state_1(run, engine.fresh_state))


@pytest.mark.invariant("ACCEPT-1", "EQUAL-1", "COUNT-2", "SHAPE-2")
def test_limits_of_requests(lane: Lane) -> None:
    """One that may have no drafts, one with a few, and neighbours with all of them, in padded batches."""
    lane.needs("num_speculative_tokens")
    words = words_of(lane)
    limits = (0, 1, None, 2, 9)
    requests = tuple(replace(r, num_speculative_tokens=most) for r, most in zip(bare(words), limits, strict=True))
    setup: dict[str, Any] = {"family": words.family, "k": K, "batch_buckets": (8,)}
    run = lane.run(requests, **setup)
    lane.check(deserves(lane, run, words.family) + equal_1(run, lane.baseline(requests, **setup)))
    lane.check(count_2(run) + count_2_blocks(run) + shape_2(run))
    for request, most in zip(requests, limits, strict=True):
        drafted = run.of(request.request_id).draft_lens or ()
        assert most is None or max(drafted) <= most


@pytest.mark.invariant("ACCEPT-1", "EQUAL-1")
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.full), True])
def test_up_to_the_end_of_the_context(lane: Lane, overlap: bool) -> None:
    """Caps that end at the context length or up to k + 1 before it."""
    lengths = (3, 9, 5, 12, 7, 10)
    requests = plain(WALK, lengths, tuple(LIMIT - length - i for i, length in enumerate(lengths)))
    setup: dict[str, Any] = {"k": K, "context_length": LIMIT, "overlap": overlap, "page_size": 1}
    run = lane.run(requests, **setup)
    lane.check(deserves(lane, run, WALK.family) + equal_1(run, lane.baseline(requests, **setup)))


def shortened(drafter: DrafterSetup | None, folder: Path) -> DrafterSetup:
    """The drafter's checkpoint with LIMIT positions."""
    assert drafter is not None
    assert drafter.model is not None
    shutil.copytree(drafter.model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LIMIT}))
    return replace(drafter, model=folder)


@pytest.mark.invariant("ACCEPT-1", "EQUAL-1", "STATE-1")
@pytest.mark.drafters(*OWN_POSITIONS)
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.full), True])
def test_past_the_end_of_the_drafters_context(lane: Lane, overlap: bool, tmp_path: Path) -> None:
    """Requests go on without drafts where the drafter's positions end, among neighbours that have some left."""
    lane.grey_box()
    words = words_of(lane)
    requests = plain(words, (LIMIT - 9, 2, LIMIT + 3, LIMIT - 1), (14, 9, 6, 4))
    plainest = lane.setup(family=words.family, k=K, overlap=overlap, chunk_size=8, snapshots=True)
    setup = replace(plainest, drafter=shortened(plainest.drafter, tmp_path / "short"))
    with lane.start_setup(setup) as engine:
        run = engine.run(requests)
        lane.check(state_1(run, engine.fresh_state))
    baseline = lane.baseline(requests, family=words.family, chunk_size=8)
    lane.check(deserves(lane, run, words.family, LIMIT) + equal_1(run, baseline))
    drafted = {done.request_id: done.draft_lens or () for done in run.completions}
    assert drafted["q0"][0] == drafted["q1"][0] > 0 == drafted["q0"][-1] == max(drafted["q2"])
