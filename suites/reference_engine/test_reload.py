"""Weights that have changed on disk: once they are read again, everything is theirs, and nothing of the old is left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.contract import Action, EngineSetup, Request, Run, SamplingParams
from harness.contract.request import ActionName
from harness.engines.reference import ReferenceEngine
from harness.invariants import accept_1, alias_1, check, kv_1
from harness.known_answer import Drafter, Family
from harness.known_answer.family import census
from harness.workloads.acceptance import deserved
from harness.workloads.known import known_family
from harness.workloads.lanes import LANES, DrafterLane
from harness.workloads.random_checkpoints import edit_config, encode, random_checkpoint
from reference_engine.model.weights import Weights
from suites.registration import suite

suite(seconds=3.9, stage="cpu", needs="cpu")

WITH_WEIGHTS = [name for name, lane in LANES.items() if lane.has_weights and lane.topk == 1]
WITH_FILES = [name for name in WITH_WEIGHTS if LANES[name].loads_checkpoint]
NEW_TOKENS, K = 12, 3


@cache
def families() -> tuple[Family, Family]:
    """Two with checkpoints of the same shapes and other laws."""
    return known_family("census"), census("census", torch.float32, seed=1)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("two-families")
    for name, family in zip(("old", "new"), families(), strict=True):
        family.write(root / name)
    for checkpoint in (root / "new").iterdir():
        turn_values(checkpoint)
    return root / "old", root / "new"


def turn_values(checkpoint: Path) -> None:
    """Reverse the values of every head, and undo it where they are read: the same model, to which the KV of another
    family is worth nothing."""
    dim = json.loads((checkpoint / "config.json").read_text()).get("head_dim")
    if dim is None:  # heads on a hidden row have no attention
        return
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    for name, tensor in weights.items():
        if ".v_proj." in name:
            weights[name] = tensor.unflatten(0, (-1, dim)).flip(1).flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            weights[name] = tensor.unflatten(1, (-1, dim)).flip(2).flatten(1, 2)
    save_file(weights, file, metadata={"format": "pt"})


class Live:
    """An engine on copies of the old family's checkpoints, which are then overwritten in place."""

    def __init__(self, lane: DrafterLane, written: tuple[Path, Path], directory: Path) -> None:
        self.lane, self.new, self.directory = lane, written[1], directory
        self.folders = {lane.target_folder(), lane.folder or lane.target_folder()}
        for folder in self.folders:
            shutil.copytree(written[0] / folder, directory / folder)
        self.engine = ReferenceEngine(self.setup(directory))

    def setup(self, root: Path) -> EngineSetup:
        """Small pages, so that much is cached."""
        drafter = self.lane.drafter(K, root, None)
        return EngineSetup(target=root / self.lane.target_folder(), drafter=drafter, page_size=4, context_length=64)

    def overwrite(self, *folders: str) -> None:
        for folder in folders or self.folders:
            file = Path(folder) / "model.safetensors"
            shutil.copyfile(self.new / file, self.directory / file)

    def run(self, requests: tuple[Request, ...], *names: ActionName, step: int = 0) -> Run:
        return self.engine.run(requests, actions=[Action(step=step, name=name) for name in names])


@pytest.fixture
def live(written: tuple[Path, Path], tmp_path: Path) -> Callable[[str], Live]:
    return lambda name: Live(LANES[name], written, tmp_path)


def closed_form(lane: DrafterLane, new: bool) -> Drafter:
    return families()[new].drafters[lane.folder]


def asked(drafter: Drafter) -> tuple[Request, ...]:
    """Prompts of several pages, in an alphabet of the drafter's target."""
    return tuple(
        Request(
            request_id=f"q{owner}",
            prompt_token_ids=drafter.target.prompt(length, 7, owner),
            sampling=SamplingParams(max_new_tokens=NEW_TOKENS),
        )
        for owner, length in enumerate((5, 17))
    )


def watched(requests: tuple[Request, ...]) -> tuple[Request, ...]:
    return tuple(replace(request, return_hidden_states=True) for request in requests)


def drafter_actions(lane: DrafterLane) -> tuple[ActionName, ...]:
    """What reads all that lies in the lane's folders; MTP layers come with the target."""
    return ("reload_target", "reload_drafter") if lane.loads_checkpoint else ("reload_target",)


@pytest.mark.parametrize(("name", "way"), [*((name, "reload") for name in WITH_WEIGHTS), ("EAGLE", "sleep")])
def test_new_weights_say_and_earn_what_they_deserve(live: Callable[[str], Live], name: str, way: str) -> None:
    """Prompts were cached under the old weights: neither their KV nor their drafter's serves any more."""
    it = live(name)
    right = closed_form(it.lane, new=True)
    requests = asked(right)
    it.run(requests)
    it.overwrite()
    actions: tuple[ActionName, ...] = ("sleep", "wake") if way == "sleep" else drafter_actions(it.lane)
    run = it.run(requests, *actions)
    check(accept_1(run, deserved(run, right)) + kv_1(run))
    for request in requests:
        assert run.of(request.request_id).token_ids == right.target.greedy(request.prompt_token_ids, NEW_TOKENS)
    again = it.run(watched(requests))
    check(alias_1(again, right.target.hidden_rows))


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_running_requests_go_on_with_the_new_weights(live: Callable[[str], Live], name: str) -> None:
    """From the tokens that they have, over KV that is computed again."""
    it = live(name)
    old, new = (closed_form(it.lane, new).target for new in (False, True))
    requests = watched(asked(closed_form(it.lane, new=False)))
    step = 3
    it.overwrite()
    run = it.run(requests, *drafter_actions(it.lane), step=step)
    check(kv_1(run))
    for request in requests:
        prompt, done = request.prompt_token_ids, run.of(request.request_id)
        deltas = [(s.step, d) for s in run.steps for d in s.deltas if d.request_id == request.request_id]
        before = sum(len(delta.token_ids) for at, delta in deltas if at < step)
        assert 0 < before < NEW_TOKENS
        committed = (*prompt, *done.token_ids[:before])
        assert done.token_ids[:before] == old.greedy(prompt, before)
        assert done.token_ids[before:] == new.greedy(committed, NEW_TOKENS - before)
        rows = [row for at, delta in deltas if at >= step for row in delta.decode_hidden]
        truth = new.hidden_rows((*prompt, *done.token_ids[:-1]))[len(committed) - 1 :]
        torch.testing.assert_close(torch.stack(rows).double(), truth, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "changed"), [*((name, "target") for name in WITH_FILES), ("EAGLE3", "drafter")])
def test_one_of_two_that_has_changed(live: Callable[[str], Live], name: str, changed: str) -> None:
    """As an engine that was started with both: what the drafter shares with its target changes with the target."""
    it = live(name)
    requests = asked(closed_form(it.lane, new=changed == "target"))[:1]
    it.run(requests)
    it.overwrite("target" if changed == "target" else it.lane.folder)
    run = it.run(requests, "reload_target" if changed == "target" else "reload_drafter")
    fresh = ReferenceEngine(it.setup(it.directory)).run(requests)
    assert [(d.token_ids, d.accept_lens) for d in run.completions] == [
        (d.token_ids, d.accept_lens) for d in fresh.completions
    ]


def test_what_the_ids_of_a_drafter_mean_is_read_again(live: Callable[[str], Live]) -> None:
    """The same draft head with its rows in reverse order, and `d2t` with them: integers are weights like others."""
    it = live("EAGLE3")
    requests = asked(closed_form(it.lane, new=False))
    right = [done.accept_lens for done in it.run(requests).completions]
    file = it.directory / it.lane.folder / "model.safetensors"
    weights = load_file(file)
    places = torch.arange(len(weights["d2t"]))
    ids = (weights["d2t"] + places).flip(0)
    turned = {"lm_head.weight": weights["lm_head.weight"].flip(0).contiguous(), "d2t": ids - places}
    save_file(weights | turned, file, metadata={"format": "pt"})
    assert [done.accept_lens for done in it.run(requests, "reload_drafter").completions] == right


def test_layers_that_come_with_the_target_can_be_read_alone(live: Callable[[str], Live]) -> None:
    """The target stays what it was: the text is the old one's, and the drafts are not."""
    it = live("MTP")
    old = closed_form(it.lane, new=False)
    requests = asked(old)
    it.overwrite()
    run = it.run(requests, "reload_drafter")
    for request in requests:
        done = run.of(request.request_id)
        assert done.token_ids == old.target.greedy(request.prompt_token_ids, NEW_TOKENS)
        assert sum(done.accept_lens or ()) / len(done.accept_lens or (0,)) < 2
    assert {d.accept_lens for d in run.completions} != set(deserved(run, old).values())


@pytest.mark.parametrize("name", [*WITH_WEIGHTS, "none"])
def test_weights_stay_where_they_are(live: Callable[[str], Live], name: str) -> None:
    """Recorded passes read fixed addresses, and a drafter holds its target's tensors."""
    it = live(name)

    def addresses() -> list[int]:
        engine = it.engine.engine
        parts = [Weights.of(part, "part") for part in (engine.target, engine.drafter)]
        return [tensor.data_ptr() for part in parts for tensor in part.tensors.values()]

    before = addresses()
    it.overwrite()
    it.run((), *(drafter_actions(it.lane) if it.lane.speculative else ("reload_target",)))
    assert addresses() == before


def test_nothing_is_done_again_when_nothing_has_changed(live: Callable[[str], Live]) -> None:
    it = live("EAGLE")
    requests = asked(closed_form(it.lane, new=False))
    it.run(requests)
    run = it.run(requests, *drafter_actions(it.lane), step=1)
    assert not any(step.preempted for step in run.steps)
    assert all(done.usage.cached_tokens > 0 for done in run.completions)


def test_tied_embeddings_change_with_their_head(tmp_path: Path) -> None:
    old, new = (random_checkpoint(tmp_path / str(seed), seed=seed, tie_word_embeddings=True) for seed in (1, 2))
    engine = ReferenceEngine(EngineSetup(target=old))
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)
    requests = [Request(request_id="a", prompt_token_ids=encode("Hello"), sampling=sampling)]
    before = engine.run(requests).of("a")
    shutil.copyfile(new / "model.safetensors", old / "model.safetensors")
    after = engine.run(requests, actions=[Action(step=0, name="reload_target")]).of("a")
    right = ReferenceEngine(EngineSetup(target=new)).run(requests).of("a")
    assert (after.token_ids, after.logprobs) == (right.token_ids, right.logprobs)
    assert after.token_ids != before.token_ids


@pytest.mark.parametrize("fields", [{"rms_norm_eps": 1e-3}, {"rope_theta": 77.0}, {"eos_token_id": 3}])
def test_another_configuration_is_refused(live: Callable[[str], Live], fields: dict[str, object]) -> None:
    it = live("EAGLE")
    for action, folder in (("reload_target", "target"), ("reload_drafter", "eagle")):
        edit_config(it.directory / folder, **fields)
        with pytest.raises(ValueError, match="start a new engine"):
            getattr(it.engine.engine, action)()
