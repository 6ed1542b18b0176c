"""The probes of vLLM's worker, on a runner that is made up: what they note of each call of a drafter."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from harness.engines.isolated.engine import WORKERS
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

DRAFTS = torch.tensor([[4, 5], [6, 7]])


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The worker file, which looks for its neighbours on a path of its own."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "wire", ModuleType("wire"))
    monkeypatch.delitem(sys.modules, "wire")
    spec = importlib.util.spec_from_file_location("vllm_worker", WORKERS / "vllm_worker.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def noted(worker: ModuleType, propose: Callable[..., Any], sampled: Any) -> list[dict[str, Any]]:
    """What is noted of one call, for the requests a and b."""
    runner = SimpleNamespace(
        propose_draft_token_ids=propose,
        input_batch=SimpleNamespace(num_reqs=2, req_ids=["a-1f", "b-2e"]),
        num_spec_tokens=2,
        discard_request_mask=SimpleNamespace(np=torch.tensor([False, True, True]).numpy()),
    )
    probe = worker.Proposals(runner)
    assert runner.propose_draft_token_ids(None, sampled) is propose()
    seen: list[dict[str, Any]] = probe.seen
    return seen


def drafts(*_: Any) -> torch.Tensor:
    return DRAFTS


@pytest.mark.parametrize(
    ("sampled", "width"),
    [(torch.tensor([[1, 2, 3], [1, -1, -1]]), 3), ([[1, 2], [3]], 2), ([[], []], 1)],
    ids=["a tensor", "lists", "nothing sampled"],
)
def test_drafts_are_noted_whatever_the_drafter_was_given(worker: ModuleType, sampled: Any, width: int) -> None:
    (told,) = noted(worker, drafts, sampled)
    assert (told["request_ids"], told["k"], told["sampled_width"]) == (["a", "b"], 2, width)
    assert told["discarded"] == [False, True]
    assert torch.equal(told["token_ids"], DRAFTS)
    assert (told["facts"]["shape"], told["facts"]["storage_ptr"]) == ([2, 2], DRAFTS.untyped_storage().data_ptr())
    assert (told["sampled"] is None) == isinstance(sampled, list)


def test_lists_of_drafts_have_no_storage_to_note(worker: ModuleType) -> None:
    listed = [[4], [5]]
    assert noted(worker, lambda *_: listed, [[1], [2]]) == []
