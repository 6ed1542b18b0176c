"""The machine finds what is planted, and the script that it prints finds the same again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from harness.invariants import InvariantError
from harness.workloads.lane import Lane
from harness.workloads.machine import EngineMachine
from reference_engine.cache.pages import PageAllocator
from reference_engine.drafters.eagle import EagleDrafter
from reference_engine.scheduler import Scheduler
from suites.registration import suite

suite(seconds=2.5, stage="cpu", needs="cpu")

Plant = Callable[[pytest.MonkeyPatch], None]


def a_prefix_hit_takes_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    match = PageAllocator.match

    def broken(self: PageAllocator, token_ids: Sequence[int]) -> list[int]:
        pages = match(self, token_ids)
        for page in pages:
            self._refs[page] -= 1
            self._evictable[page] = None
        return pages

    monkeypatch.setattr(PageAllocator, "match", broken)


def an_end_keeps_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Scheduler._release

    def broken(self: Scheduler, request: object) -> None:
        request.pages.pop()  # type: ignore[attr-defined]
        release(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "_release", broken)


def draft_rows_are_a_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagleDrafter, "features_of", lambda _self, hidden: torch.roll(hidden, 1, dims=1))


PLANTED: dict[str, tuple[Plant, set[str]]] = {
    "a prefix hit takes no reference": (a_prefix_hit_takes_no_reference, {"KV-1"}),
    "an end keeps a page": (an_end_keeps_a_page, {"KV-1"}),
    "draft rows are a step late": (draft_rows_are_a_step_late, {"STATE-1"}),
}

IN_EVERY_RUN, *REST = PLANTED


@pytest.mark.drafters("EAGLE")
@pytest.mark.parametrize("name", [IN_EVERY_RUN, *(pytest.param(name, marks=pytest.mark.full) for name in REST)])
def test_planted_bugs(lane: Lane, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant, expected = PLANTED[name]
    plant(monkeypatch)
    only_find = settings(
        max_examples=30,
        stateful_step_count=25,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(InvariantError) as found:
        run_state_machine_as_test(lambda: EngineMachine(lane, tmp_path), settings=only_find)
    assert expected & {violation.invariant for violation in found.value.violations}
    (script,) = tmp_path.glob("*.py")
    with pytest.raises(InvariantError) as again:
        exec(script.read_text())
    assert [v.render() for v in again.value.violations] == [v.render() for v in found.value.violations]
    monkeypatch.undo()
    exec(script.read_text())
