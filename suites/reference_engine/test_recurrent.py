"""Recurrent layers in the reference engine: the numbers of a dense forward, every state in its place, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.contract import DrafterSetup, EngineSetup, Refused, Request, SamplingParams
from harness.engines import engine_factory
from harness.engines.reference import ReferenceEngine
from harness.known_answer.base import write_checkpoint
from harness.known_answer.dense import target_states
from harness.known_answer.hybrid import HybridTarget
from harness.workloads.random_checkpoints import edit_config
from reference_engine import EngineConfig
from reference_engine.cache.kv import NULL_PAGE, POISON
from reference_engine.cache.recurrent import RecurrentCache, RecurrentPass
from reference_engine.model.config import ModelConfig
from suites.reference_engine.support import ask
from suites.registration import suite

suite(seconds=0.5, stage="cpu", needs="cpu")

PROMPTS = (tuple(range(3, 24)), (7,), (5, 9, 5, 30, 1, 1))


def random_weights(shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, tensor in shapes.items():
        if name.endswith("norm.weight"):
            weights[name] = 0.5 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        else:
            weights[name] = 0.25 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid whose weights are random, so that its gates depend on the data; recurrent heads in both layers."""
    directory = tmp_path_factory.mktemp("hybrid")
    target = HybridTarget()
    weights = random_weights(target.weights)
    first = {
        name.replace("layers.1", "layers.0"): 1.5 * tensor for name, tensor in weights.items() if "recurrent" in name
    }
    config = target.config | {"recurrent_layers": [0, 1], "rms_norm_eps": 1e-6}
    write_checkpoint(directory, config, weights | first)
    return directory


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    shutil.copytree(checkpoint, tmp_path / "copy")
    return tmp_path / "copy"


def wrong_drafts(_owner: str, tokens: tuple[int, ...], k: int) -> list[int]:
    """Junk behind a guess that is right now and then."""
    return [(tokens[-1] + step) % 33 for step in range(k)]


SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunk_size": 4, "page_size": 2},
    "windows": {"drafter": DrafterSetup.chain("CUSTOM", 4, script=wrong_drafts), "page_size": 4, "overlap": True},
}


@pytest.mark.parametrize("name", SETUPS)
def test_the_numbers_of_a_dense_forward(checkpoint: Path, name: str) -> None:
    """Gates that depend on the data, float64: every hidden row and token against a forward that has no state."""
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    requests = [
        Request(request_id=str(i), prompt_token_ids=prompt, sampling=params, return_hidden_states=True)
        for i, prompt in enumerate(PROMPTS)
    ]
    setup = replace(EngineSetup(target=checkpoint, dtype="float64"), **SETUPS[name])
    config, weights = json.loads((checkpoint / "config.json").read_text()), load_file(checkpoint / "model.safetensors")
    for done in engine_factory("reference").start(setup).run(requests).completions:
        states = target_states(config, weights, (*done.prompt_token_ids, *done.token_ids[:-1]))
        assert done.hidden_states is not None
        rows = torch.cat([done.hidden_states.prefill, torch.stack(done.hidden_states.decode)])
        # The engine's rotary tables are float32.
        assert (rows - states.hidden).abs().max() < 1e-5
        assert list(done.token_ids) == states.logprobs.argmax(-1)[len(done.prompt_token_ids) - 1 :].tolist()


def test_a_state_follows_its_parent() -> None:
    """Chain and tree over the same updates: with gate 1/2 and updates 1, 2, 4, ... every path has a sum of its own."""
    updates = (2.0 ** torch.arange(5)).view(1, 5, 1, 1, 1)
    gates = torch.full((1, 5, 1), 0.5)
    chain = RecurrentPass(torch.full((1, 1, 1, 1, 1), 32.0))
    assert chain.scan(gates, updates).flatten().tolist() == [17.0, 10.5, 9.25, 12.625, 22.3125]
    tree = RecurrentPass(chain.initial, torch.tensor([[-1, 0, 0, 1, 2]]))
    assert tree.scan(gates, updates).flatten().tolist() == [17.0, 10.5, 12.5, 13.25, 22.25]


def cache_of(checkpoint: Path, **fields: Any) -> RecurrentCache:
    config = EngineConfig(
        model=checkpoint, page_size=2, num_pages=6, max_running=3, context_length=32, poison=True, **fields
    )
    return RecurrentCache(config, ModelConfig.load(checkpoint))


def finished(cache: RecurrentCache, requests: int, tokens: int) -> RecurrentPass:
    """A pass whose state after token j of request i is 100 i + j + 1, in both layers."""
    shape = (requests, tokens, *cache.states.shape[2:])
    values = (100 * torch.arange(requests)[:, None] + torch.arange(tokens) + 1).view(requests, tokens, 1, 1, 1)
    return RecurrentPass(cache.states[:, :requests], after=[values.expand(shape).to(cache.states.dtype)] * 2)


def told(states: torch.Tensor) -> list[float]:
    """What each state of the last layer holds everywhere."""
    assert torch.equal(states, states[..., :1, :1, :1].expand_as(states))
    return states[-1, ..., 0, 0, 0].tolist()


def test_settling_keeps_the_last_token_that_counts(checkpoint: Path) -> None:
    """Two requests and a padding row behind them: the state at the end of each path, a checkpoint where a page ends."""
    cache = cache_of(checkpoint)
    block_table = torch.tensor([[1, 2, 3], [4, 5, 6]])
    path = torch.tensor([[0, 2, 3, -1], [0, -1, -1, -1]])
    rows, starts = torch.tensor([2, 0]), torch.tensor([1, 2])
    cache.settle(finished(cache, 3, 4), rows, block_table, starts, path, torch.tensor([3, 1]))
    assert told(cache.states) == [101.0, POISON, 4.0, POISON]
    # Position 1 ends page 1 and is the root; position 3 ends page 2 and is node 3. The other request ends none.
    assert told(cache.checkpoints)[NULL_PAGE + 1 :] == [1.0, 4.0, POISON, POISON, POISON, POISON]


def test_a_first_chunk_starts_from_nothing_or_from_the_checkpoint(checkpoint: Path) -> None:
    cache = cache_of(checkpoint)
    block_table = torch.tensor([[1, 2, 3], [4, 5, 6]])
    cache.settle(finished(cache, 2, 4), torch.tensor([0, 1]), block_table, *whole(2, 4))
    again, rows = torch.tensor([[1, 2, 6], [4, 5, 3], [5, 4, 2]]), torch.tensor([2, 1, 0])
    states = cache.prefill(rows, again, torch.tensor([4, 4, 0]), torch.tensor([True, False, True])).initial
    assert told(states) == [4.0, 104.0, 0.0]
    cache.poison([2])
    cache.release(1)
    states = cache.prefill(rows, again, torch.tensor([4, 4, 0]), torch.tensor([True, False, True])).initial
    assert told(states) == [POISON, POISON, 0.0]


def whole(requests: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Starts, path and lengths of passes from position 0 on, all of whose tokens count."""
    path = torch.arange(tokens).expand(requests, -1)
    return torch.zeros(requests, dtype=torch.long), path, torch.full((requests,), tokens)


def test_states_are_wider_than_a_reduced_model(checkpoint: Path) -> None:
    for dtype, wide in (("bfloat16", torch.float32), ("float32", torch.float32), ("float64", torch.float64)):
        assert cache_of(checkpoint, dtype=dtype).states.dtype == wide


def test_a_plain_target_has_no_states(open_lane: Callable[[str], Any]) -> None:
    engine = ReferenceEngine(open_lane("none").setup()).engine
    assert engine.pool.recurrent is None


def test_compiling_is_refused(checkpoint: Path) -> None:
    with pytest.raises(Refused, match=r"compile=True: a target with recurrent layers"):
        ReferenceEngine(EngineSetup(target=checkpoint, context_length=64), compile=True)


def test_a_recurrent_draft_model_is_refused(checkpoint: Path) -> None:
    setup = EngineSetup(target=checkpoint, drafter=DrafterSetup.chain("STANDALONE", 2, checkpoint))
    with pytest.raises(Refused, match="a draft model with recurrent layers"):
        engine_factory("reference").start(setup)


@pytest.mark.parametrize(
    ("field", "value"), [("recurrent_layers", [0, 2]), ("recurrent_layers", None), ("recurrent_key_dim", 0)]
)
def test_a_config_that_does_not_fit_is_refused(copy: Path, field: str, value: object) -> None:
    edit_config(copy, **{field: value})
    with pytest.raises(Refused, match=field):
        engine_factory("reference").start(EngineSetup(target=copy))


@pytest.mark.parametrize("name", ["q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.bias", "o_proj.weight"])
@pytest.mark.parametrize("fault", ["missing", "misshapen", "left over"])
def test_a_tensor_that_does_not_fit_is_refused(copy: Path, name: str, fault: str) -> None:
    weights = load_file(copy / "model.safetensors")
    name = f"model.layers.1.recurrent.{name}"
    tensor = weights.pop(name)
    if fault == "misshapen":
        weights[name] = torch.cat([tensor, tensor[:1]])
    elif fault == "left over":
        weights |= {name: tensor, f"{name}.more": tensor.clone()}
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(Refused, match=name.replace(".", r"\.")):
        engine_factory("reference").start(EngineSetup(target=copy))


def test_every_request_ends_without_a_row_of_its_own_left(checkpoint: Path) -> None:
    """Rows are taken again and again; what was given back is poisoned."""
    engine = ReferenceEngine(EngineSetup(target=checkpoint, max_running=2, context_length=64, poison=True))
    engine.run([ask(str(i), prompt=(3 + i,) * (1 + i), max_new_tokens=3) for i in range(5)])
    cache = engine.engine.pool.recurrent
    assert cache is not None
    assert told(cache.states)[:2] == [POISON, POISON]
