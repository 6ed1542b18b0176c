"""A run that was written and read again says the same, to the last shared storage."""

from __future__ import annotations

import dataclasses
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.contract import (
    Capabilities,
    Completion,
    Delta,
    EngineSetup,
    HiddenStates,
    LogprobRow,
    Request,
    Run,
    SamplingParams,
    StepTrace,
    TensorFacts,
    Usage,
)
from harness.invariants import judge
from harness.record import NotRecorded, read, write
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.scenarios import SCENARIOS
from harness.workloads.verdicts import of_a_recording
from suites.registration import suite

suite(seconds=1.2, stage="cpu", needs="cpu")

CLAIMS = Capabilities(engine="ours", version="1", drafters=frozenset({"EAGLE"}), features=frozenset({"logprobs"}))


def run_of(*completions: Completion, **fields: Any) -> Run:
    cap = SamplingParams(max_new_tokens=1)
    requests = tuple(Request(request_id=done.request_id, prompt_token_ids=(1, 2), sampling=cap) for done in completions)
    return Run(
        setup=EngineSetup(target=Path("somewhere")),
        capabilities=CLAIMS,
        requests=requests,
        completions=completions,
        **fields,
    )


def completion(name: str = "a", **fields: Any) -> Completion:
    usual = {"prompt_token_ids": (1, 2), "token_ids": (3,), "finish_reason": "length", "usage": Usage(2, 1)}
    return Completion(request_id=name, **{**usual, **fields})


def same(one: Any, other: Any) -> bool:
    """Equal to the last value; tensors bit for bit, of one dtype, shape and stride."""
    if isinstance(one, torch.Tensor):
        kept = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        return kept and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    if dataclasses.is_dataclass(one):
        fields = [field.name for field in dataclasses.fields(one) if field.name != "script"]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in fields)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


@pytest.mark.parametrize("lane_name", ["none", "EAGLE3", "CUSTOM", "EXTRACT"])
@pytest.mark.parametrize("scenario", ["mixed_flags", "tiny_pool_preemption"])
def test_a_run_of_the_reference_engine(lane_name: str, scenario: str, tmp_path: Path) -> None:
    lane = Lane("reference", LANES[lane_name], tmp_path / "known", record=tmp_path / "traces")
    run = lane.run_batch(SCENARIOS[scenario](vocabulary("walk")))
    (folder,) = (tmp_path / "traces").iterdir()
    back = read(folder)
    assert same(run, back)
    assert judge(back) == []
    assert of_a_recording(back, None, lane, "walk") == []


def test_a_folder_is_named_by_what_drafted(tmp_path: Path) -> None:
    """A lane runs its baselines without a drafter."""
    lane = Lane("reference", LANES["EAGLE3"], tmp_path / "known", record=tmp_path / "traces")
    batch = SCENARIOS["short_prompts"](vocabulary("walk"))
    for speculative in (True, False):
        lane.run_batch(batch, speculative=speculative)
    names = sorted(folder.name.rpartition("-")[0] for folder in (tmp_path / "traces").iterdir())
    assert names == ["EAGLE3", "none"]


def test_logprobs_that_are_no_numbers(tmp_path: Path) -> None:
    rows = (LogprobRow(3, float("-inf"), 2, ((1, float("nan")), (0, float("inf")))),)
    run = run_of(completion(logprobs=rows))
    assert same(run, read(write(run, tmp_path)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    rows = torch.tensor([[0.0, 1.0], [2.0, float("nan")]]).nan_to_num(3).to(dtype)
    run = run_of(completion(hidden_states=HiddenStates(rows, ())), completion("b", pooled_hidden=rows[:0]))
    assert same(run, read(write(run, tmp_path)))


def test_what_shared_memory_shares_it_again(tmp_path: Path) -> None:
    """ALIAS-2 must judge a recording as it would have judged the run."""
    whole = torch.arange(12.0).view(4, 3)
    views = (whole[0], whole[1], whole[2:].t()[0])
    step = StepTrace(step=0, kind="decode", deltas=(Delta("a", 0, (3,), decode_hidden=views),))
    run = run_of(completion(hidden_states=HiddenStates(whole.clone(), ())), steps=(step,))
    back = read(write(run, tmp_path))
    facts = [TensorFacts.of(row) for row in back.steps[0].deltas[0].decode_hidden]
    assert len({fact.storage_ptr for fact in facts}) == 1
    assert [fact.storage_offset for fact in facts] == [0, 3, 6]
    assert facts[2].stride == (3,)
    own = TensorFacts.of(back.completions[0].hidden_states.prefill)  # type: ignore[union-attr]
    assert own.storage_ptr != facts[0].storage_ptr
    assert [v.invariant for v in judge(run)] == [v.invariant for v in judge(back)]
    assert "ALIAS-2" in {violation.invariant for violation in judge(back)}


def test_a_fault_in_a_run_is_found_in_its_recording(tmp_path: Path) -> None:
    run = run_of(replace(completion(), usage=Usage(2, 5)))
    assert {violation.invariant for violation in judge(read(write(run, tmp_path)))} == {"COUNT-1"}


def test_a_run_is_not_written_over_another(tmp_path: Path) -> None:
    write(run_of(), tmp_path)
    with pytest.raises(ValueError, match="a folder of its own"):
        write(run_of(), tmp_path)


def test_sampling_is_kept(tmp_path: Path) -> None:
    asked = SamplingParams(temperature=0.5, logit_bias=((3, float("-inf")),), stop=("a",), bad_words=((1, 2),), seed=7)
    run = replace(run_of(completion()), requests=(Request(request_id="a", prompt_token_ids=(1, 2), sampling=asked),))
    assert read(write(run, tmp_path)).requests == run.requests


@pytest.mark.parametrize("room", [100, 2000])
def test_a_run_without_room_is_not_half_recorded(tmp_path: Path, room: int) -> None:
    """Neither file is left, whichever has outgrown what there is."""
    done = completion(hidden_states=HiddenStates(torch.ones(2, 5000), ()))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(NotRecorded, match=f"{tmp_path}.*: the run was not recorded .*; make room there"):
            write(run_of(done), tmp_path / "trace")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "trace").iterdir()) == []
