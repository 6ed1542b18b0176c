"""CONF-2 by sweep: each tensor of each checkpoint left out, renamed, misshapen or random; drafters of other targets.

What has the wrong form is declined at start-up, by name. Values cannot be declined: a random tensor of a drafter leaves
the text alone and shows in the acceptance, and a random tensor of a target shows in rows or tokens. One that nothing
notices might as well have been left at its initial value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.contract import Action, EngineSetup, Request, Run
from harness.contract.request import ActionName
from harness.invariants import accept_1, alias_1, equal_1
from harness.known_answer import Family
from harness.known_answer.drafters.medusa import NUM_HEADS
from harness.known_answer.family import census
from harness.workloads.acceptance import deserved
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES, factory_of
from harness.workloads.mutilate import FAULTS, Workshop, randomised
from harness.workloads.scenarios import plain
from harness.workloads.vocabulary import Vocabulary
from suites.conformance.arrange import ROWS, RecordExamples
from suites.registration import suite

suite(seconds=1.4, stage="cpu", needs="cpu")

WITH_WEIGHTS = [name for name, spec in LANES.items() if spec.has_weights and spec.topk == 1]
WITH_CHECKPOINT = [name for name, spec in LANES.items() if not spec.speculative] + WITH_WEIGHTS
FEW = 3
"""Tensors that the fast tier makes random, the largest."""

HEADS = vocabulary("walk-perfect")
"""What MEDUSA is asked for where every head must count: behind one that errs, or cannot know what follows, heads are
idle."""

OPTIONAL = {
    "embed_tokens.weight": "a head that has no embeddings of its own reads the target's, and these are the same",
    "t2d": "says once more what d2t says",
}
"""Tensors that a drafter's checkpoint may do without, and why its drafts stay what they are."""

MAPS = ("d2t", "t2d")
"""Maps between vocabularies, of which an engine can see that they are none."""


def bench(lane: Lane, directory: Path, words: Vocabulary = ROWS, k: int = 3) -> tuple[Workshop, EngineSetup]:
    """A copy of the lane's drafter, or of its target where the drafter is in there or nobody drafts; and a set-up with
    it. The target of the other lanes is that of the lane without a drafter."""
    setup = lane.setup(family=words.family, k=k)
    if setup.drafter is None or setup.drafter.model is None:
        return Workshop(setup.target, directory), replace(setup, target=directory)
    drafter = replace(setup.drafter, model=directory)
    return Workshop(setup.drafter.model, directory), replace(setup, drafter=drafter)


def is_drafters(lane: Lane, name: str) -> bool:
    """Whether a tensor of the lane's checkpoint is the drafter's alone."""
    if not lane.spec.within_target:
        return lane.speculative
    return name not in lane.drafter(ROWS.family).target.weights


def asked(words: Vocabulary = ROWS, *, hidden: bool = False) -> tuple[Request, ...]:
    return plain(words, (9, 14), (10, 10), return_hidden_states=hidden)


def started(lane: Lane, setup: EngineSetup, requests: tuple[Request, ...]) -> Run:
    engine = factory_of(lane.engine).start(setup)
    try:
        return engine.run(requests)
    finally:
        engine.close()


def declined(lane: Lane, setup: EngineSetup) -> str:
    """Why the engine does not start, or nothing."""
    try:
        factory_of(lane.engine).start(setup).close()
    except ValueError as refusal:
        return str(refusal)
    return ""


@pytest.mark.invariant("CONF-2")
@pytest.mark.drafters(*WITH_CHECKPOINT)
def test_every_tensor_is_missed(lane: Lane, thorough: bool, tmp_path: Path, record_examples: RecordExamples) -> None:
    """In the fast tier each tensor left out, and one other fault, in turn; in the full tier every fault."""
    workshop, setup = bench(lane, tmp_path / "bench")
    others = sorted(FAULTS.keys() - {"missing"})
    for place, name in enumerate(workshop.names):
        for kind in FAULTS if thorough else ("missing", others[place % len(others)]):
            workshop.damage(FAULTS[kind], name)
            if kind == "missing" and name in OPTIONAL and is_drafters(lane, name):
                run = started(lane, setup, asked())
                lane.check(accept_1(run, deserved(run, lane.drafter(ROWS.family))))
                continue
            refusal = declined(lane, setup)
            assert refusal, f"{kind} {name}: the engine starts"
            assert not lane.capabilities.grey_box or name in refusal, f"{kind} {name}: {refusal}"
            record_examples(1)


def noticed(lane: Lane, run: Run, name: str, words: Vocabulary = ROWS) -> bool:
    """Whether a run shows that the tensor is not what it should be."""
    if is_drafters(lane, name):
        right = deserved(run, lane.drafter(words.family))
        return any(done.accept_lens != right[done.request_id] for done in run.completions)
    tokens = {r.request_id: words.continue_(r.prompt_token_ids, r.sampling.max_new_tokens) for r in run.requests}
    strayed = any(done.token_ids != tokens[done.request_id] for done in run.completions)
    return strayed or bool(alias_1(run, lane.rows(words.family)))


@pytest.mark.invariant("CONF-2")
@pytest.mark.drafters(*WITH_CHECKPOINT)
def test_every_tensor_matters(lane: Lane, thorough: bool, tmp_path: Path, record_examples: RecordExamples) -> None:
    """Random tensors: in the fast tier the largest few of the drafter, or else of the target, and those that an engine
    could take from elsewhere instead."""
    words, k = (HEADS, NUM_HEADS) if lane.spec.method == "MEDUSA" else (ROWS, 3)
    workshop, setup = bench(lane, tmp_path / "bench", words, k)
    claimed = lane.capabilities.features
    own = [name for name in workshop.names if is_drafters(lane, name)]
    few = [*(own or workshop.names)[:FEW], *(name for name in own if name in OPTIONAL)]
    for name in workshop.names if thorough else few:
        workshop.damage(randomised, name)
        refusal = declined(lane, setup)
        if name in MAPS and refusal:
            assert name in refusal, f"{name}: {refusal}"
            continue
        of_drafter = is_drafters(lane, name)
        run = started(lane, setup, asked(words, hidden=not of_drafter and "return_hidden_states" in claimed))
        if of_drafter:
            lane.check(equal_1(run, lane.baseline(asked(words), family=words.family)))
        assert noticed(lane, run, name, words), f"{name} is random, and nothing shows it"
        record_examples(1)


@pytest.mark.invariant("ACCEPT-1")
@pytest.mark.drafters(*WITH_WEIGHTS)
def test_weights_that_are_read_again_are_those_of_the_files(
    lane: Lane, tmp_path: Path, record_examples: RecordExamples
) -> None:
    """Of the drafter the largest tensor is random at start-up, and right when an action reads the files again."""
    actions: tuple[ActionName, ...] = ("reload_drafter", "reload_target")[: 1 + lane.spec.within_target]
    lane.needs(*actions)
    workshop, setup = bench(lane, tmp_path / "bench")
    name = next(name for name in workshop.names if is_drafters(lane, name))
    right = lane.drafter(ROWS.family)
    for action in actions:
        workshop.damage(randomised, name)
        with lane.start_setup(setup) as engine:
            run = engine.run(asked())
            assert noticed(lane, run, name), f"{name} is random, and nothing shows it"
            workshop.mend()
            engine.run(asked(), actions=[Action(step=2, name=action)])
            run = engine.run(asked())
        lane.check(accept_1(run, deserved(run, right)))
        record_examples(1)


@cache
def other_family() -> Family:
    """Same shapes as `ROWS`, another law."""
    return census("other", torch.float32, seed=1)


def drafter_of_another_target(lane: Lane, directory: Path) -> EngineSetup:
    workshop, setup = bench(lane, directory)
    foreign = other_family().drafters[lane.spec.folder].weights
    mine = lane.drafter(ROWS.family).weights
    weights = {name: foreign[name] if is_drafters(lane, name) else mine[name] for name in workshop.names}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    return setup


@pytest.mark.invariant("CONF-2")
@pytest.mark.drafters(*WITH_WEIGHTS)
def test_a_drafter_of_another_target_earns_less(lane: Lane, tmp_path: Path) -> None:
    """It has the right form, so it runs: the text is the target's, and hardly a draft is accepted."""
    run = started(lane, drafter_of_another_target(lane, tmp_path / "bench"), asked())
    lane.check(equal_1(run, lane.baseline(asked(), family=ROWS.family)))
    right = deserved(run, lane.drafter(ROWS.family))
    for done in run.completions:
        steps, due = len(done.accept_lens or ()), len(right[done.request_id])
        assert steps > due, f"{done.request_id}: {steps} verify steps, as few as with its own drafter ({due})"


@pytest.mark.invariant("CONF-2")
@pytest.mark.drafters(*WITH_WEIGHTS)
def test_a_drafter_of_another_size_is_declined(lane: Lane, tmp_path: Path) -> None:
    """Another vocabulary and another hidden size, which are one in the families."""
    for setup in drafters_of_another_size(lane, tmp_path / "bench"):
        assert declined(lane, setup), f"{setup}: the engine starts"


def drafters_of_another_size(lane: Lane, directory: Path) -> Iterator[EngineSetup]:
    setup = lane.setup(family=ROWS.family)
    if lane.spec.loads_checkpoint:
        yield from (replace(setup, drafter=lane.setup(family=family).drafter) for family in ("law", "walk"))
        return
    workshop, setup = bench(lane, directory)
    smaller = {**lane.drafter("law").weights}
    weights = {**lane.drafter(ROWS.family).weights}
    weights |= {name: smaller[name] for name in workshop.names if is_drafters(lane, name)}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    yield setup
