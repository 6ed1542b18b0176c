"""Life of the reference engine: what an action means where another is in force, and what sleep gives up."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.workloads.lanes import LANES
from harness.workloads.mutilate import FAULTS, mutilate
from reference_engine import EngineConfig, LLMEngine, SamplingParams, SpecConfig
from reference_engine.engine import StepOutput
from reference_engine.model.weights import Weights
from suites.reference_engine.conftest import OpenLane
from suites.reference_engine.support import PROMPT
from suites.registration import suite

suite(seconds=0.9, stage="cpu", needs="cpu")

LENGTH = 8


def new_engine(open_lane: OpenLane, name: str, target: Path | None = None, **config: object) -> LLMEngine:
    """An engine of the lane with k = 2, on another copy of its target where one is given."""
    setup = open_lane(name).setup(k=2)
    spec = None
    if setup.drafter is not None:
        model = setup.drafter.model
        options = dict(open_lane(name).spec.options)
        steps = setup.drafter.num_steps
        spec = SpecConfig(
            method=setup.drafter.method, model=model, num_steps=steps, num_draft_tokens=steps + 1, **options
        )
    return LLMEngine(EngineConfig(model=target or setup.target, spec=spec, context_length=64, **config))  # type: ignore[arg-type]


class Tokens:
    """What an engine has said so far, by request."""

    def __init__(self) -> None:
        self.of: defaultdict[str, list[int]] = defaultdict(list)

    def take(self, engine: LLMEngine, steps: int = 1000) -> list[StepOutput]:
        """Step until nothing is left, at most `steps` times."""
        taken = []
        while engine.has_unfinished and len(taken) < steps:
            taken.append(engine.step())
            for output in taken[-1].outputs:
                self.of[output.request_id] += output.token_ids
        return taken


@pytest.mark.parametrize(
    ("before", "action", "mend"),
    [
        ([], "resume", "pause it first"),
        ([], "wake", "send it to sleep first"),
        (["pause"], "pause", "resume it first"),
        (["sleep"], "pause", "wake it first"),
        (["sleep"], "resume", "wake it first"),
        (["sleep"], "sleep", "wake it first"),
        (["sleep"], "reload_target", "wake it first"),
        (["sleep"], "reload_drafter", "wake it first"),
        (["pause", "sleep"], "resume", "wake it first"),
        ([], "reload_drafter", "no weights of a drafter"),
    ],
)
def test_actions_without_meaning_are_refused(open_lane: OpenLane, before: list[str], action: str, mend: str) -> None:
    """Nothing changes: the engine goes on from where it is."""
    engine = new_engine(open_lane, "none")
    for name in before:
        getattr(engine, name)()
    with pytest.raises(ValueError, match=f"^{action}=.*{mend}"):
        getattr(engine, action)()
    for name in reversed(before):
        getattr(engine, {"pause": "resume", "sleep": "wake"}[name])()
    engine.add_request("a", PROMPT, SamplingParams(max_new_tokens=LENGTH))
    tokens = Tokens()
    tokens.take(engine)
    assert tokens.of["a"] == list(open_lane("none").target().greedy(PROMPT, LENGTH))


@pytest.mark.parametrize("owner", ["a", "a#", "a#x", "#"])
def test_a_name_that_can_be_no_running_request_is_refused(open_lane: OpenLane, owner: str) -> None:
    with pytest.raises(ValueError, match=r"preempt=.*request_id#index"):
        new_engine(open_lane, "none").preempt(owner)


def test_preempting_what_does_not_run_has_no_effect(open_lane: OpenLane) -> None:
    engine = new_engine(open_lane, "none", max_running=1)
    for name in ("runs", "waits"):
        engine.add_request(name, PROMPT, SamplingParams(max_new_tokens=LENGTH))
    engine.step()
    for owner in ("waits#0", "runs#1", "nobody#0"):
        engine.preempt(owner)
    assert engine.step().preempted == []
    engine.preempt("runs#0")
    assert [step.preempted for step in Tokens().take(engine, steps=2)] == [["runs#0"], []]


def test_a_drafter_without_weights_has_nothing_to_read(open_lane: OpenLane) -> None:
    setup = open_lane("CUSTOM").setup(k=2)
    assert setup.drafter is not None
    spec = SpecConfig(method="CUSTOM", num_steps=2, num_draft_tokens=3, script=setup.drafter.script)
    with pytest.raises(ValueError, match="reload_drafter='CUSTOM': there are no weights of a drafter"):
        LLMEngine(EngineConfig(model=setup.target, spec=spec)).reload_drafter()


@pytest.mark.parametrize("method", ["MTP", "STANDALONE"])
def test_a_drafter_in_the_targets_own_folder(open_lane: OpenLane, method: str) -> None:
    """Named outright, as the folder of the drafter too."""
    lane = open_lane("MTP" if method == "MTP" else "none")
    target = lane.setup().target
    spec = SpecConfig(method=method, model=target, num_steps=2, num_draft_tokens=3)
    engine = LLMEngine(EngineConfig(model=target, spec=spec, context_length=64))
    engine.reload_target()
    engine.reload_drafter()
    engine.add_request("a", PROMPT, SamplingParams(max_new_tokens=LENGTH))
    tokens = Tokens()
    tokens.take(engine)
    assert tokens.of["a"] == list(lane.target().greedy(PROMPT, LENGTH))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_paused_engine_lets_results_in_and_launches_nothing(open_lane: OpenLane, overlap: bool) -> None:
    engine = new_engine(open_lane, "EAGLE", overlap=overlap)
    engine.add_request("a", PROMPT, SamplingParams(max_new_tokens=LENGTH))
    tokens = Tokens()
    tokens.take(engine, steps=2)
    engine.pause()
    launched = engine.runner.num_target_forwards
    steps = tokens.take(engine, steps=3)
    assert [step.kind for step in steps] == ["idle"] * 3
    assert [bool(step.outputs) for step in steps] == [overlap, False, False]
    assert engine.runner.num_target_forwards == launched
    engine.resume()
    tokens.take(engine)
    assert tokens.of["a"] == list(open_lane("EAGLE").target().greedy(PROMPT, LENGTH))


def tensors_on_the_device(engine: LLMEngine) -> list[torch.Tensor]:
    """Weights, KV and what runs on them."""
    caches = [engine.cache, *(engine.drafter.caches() if engine.drafter else ())]
    held = [layer.pages for cache in caches for layer in cache.layers] + [engine.pool.token_ids]
    for part in (engine.target, engine.drafter):
        held += Weights.of(part, "part").tensors.values()
    return held


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is released must not wait for the garbage collector's next turn."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", [name for name, lane in LANES.items() if not lane.scripted and lane.topk == 1])
def test_sleep_releases_memory_and_wake_restores_everything(open_lane: OpenLane, name: str) -> None:
    """Twice, while requests run, come and go."""
    engine = new_engine(open_lane, name, overlap=True, page_size=4)
    sampling, tokens = SamplingParams(max_new_tokens=LENGTH), Tokens()
    engine.add_request("runs", PROMPT, sampling)
    for goes, comes in (("goes", "comes"), ("goes again", "comes again")):
        engine.add_request(goes, PROMPT, sampling)
        tokens.take(engine, steps=2)
        held = [weakref.ref(tensor) for tensor in tensors_on_the_device(engine)]
        engine.sleep()
        assert len(held) > 20
        assert [ref() for ref in held if ref() is not None] == []
        assert len(engine.allocator.free_pages()) == engine.allocator.num_pages
        engine.add_request(comes, PROMPT, sampling)
        engine.abort(goes)
        tokens.take(engine, steps=1)
        engine.wake()
    tokens.take(engine)
    right = list(open_lane(name).target().greedy(PROMPT, LENGTH))
    assert [tokens.of[name] for name in ("runs", "comes", "comes again")] == [right] * 3


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_files_leave_the_engine_as_it_is(open_lane: OpenLane, fault: str, tmp_path: Path) -> None:
    """Awake it runs on, with its requests; asleep it sleeps on, until the files are whole again."""
    good = open_lane("none").setup().target
    live = tmp_path / "live"
    shutil.copytree(good, live)
    engine = new_engine(open_lane, "none", live)
    engine.add_request("a", PROMPT, SamplingParams(max_new_tokens=LENGTH))
    tokens = Tokens()
    tokens.take(engine, steps=3)
    broken = mutilate(good, tmp_path / "broken", FAULTS[fault]) / "model.safetensors"
    shutil.copyfile(broken, live / broken.name)
    with pytest.raises(ValueError, match=r"tensor '.*'"):
        engine.reload_target()
    tokens.take(engine, steps=1)
    engine.sleep()
    with pytest.raises(ValueError, match=r"tensor '.*'"):
        engine.wake()
    assert engine.step().kind == "idle"
    shutil.copyfile(good / broken.name, live / broken.name)
    engine.wake()
    tokens.take(engine)
    assert tokens.of["a"] == list(open_lane("none").target().greedy(PROMPT, LENGTH))
