"""What a campaign keeps: one finding for each fault, and nothing done twice."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ci.campaign import seed_range
from ci.campaign_plugin import example_of
from ci.campaign_state import Campaign, Failure, Scope, Task, append, opened, read_failures, write
from ci.campaign_workers import started
from harness.invariants.base import leaves
from suites.registration import suite

suite(seconds=0.6, stage="cpu", needs="cpu")

SCOPE = Scope(suites=("suites/conformance",), drafters=("EAGLE",), invariants=(), tier="full")
FAILURE = Failure(
    engine="vllm",
    invariants=("COUNT-1",),
    drafter="EAGLE",
    test="test_count.py::test_rows",
    message="COUNT-1: 8 expected, 9 came",
    seed=3,
    example="test_rows(batch=1)",
)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"seed": 4, "drafter": "MTP", "reproduce": "pytest x", "decorator": "@x"}, True),
        ({"message": "COUNT-1: 8 expected, 10 came"}, True),
        ({"invariants": ("COUNT-2",)}, False),
        ({"example": "test_rows(batch=2)"}, False),
        ({"engine": "sglang"}, False),
        ({"test": "test_count.py::test_other"}, False),
    ],
)
def test_a_finding_is_an_invariant_and_its_smallest_example(changes: dict[str, object], same: bool) -> None:
    campaign = Campaign(scope=SCOPE)
    assert campaign.add(FAILURE)
    assert campaign.add(replace(FAILURE, **changes)) is not same
    assert len(campaign.findings) == (1 if same else 2)


def test_a_finding_knows_its_seeds_and_lanes() -> None:
    campaign = Campaign(scope=SCOPE)
    for seed, drafter in ((9, "MTP"), (3, "EAGLE"), (9, "EAGLE")):
        campaign.add(replace(FAILURE, seed=seed, drafter=drafter))
    (finding,) = campaign.findings.values()
    assert (finding.seeds, finding.drafters) == ([3, 9], ["EAGLE", "MTP"])


def test_without_an_example_the_words_decide() -> None:
    campaign = Campaign(scope=SCOPE)
    for message in ("engine died\nat 1", "engine died\nat 2", "engine hung"):
        campaign.add(replace(FAILURE, example="", message=message))
    assert len(campaign.findings) == 2


def test_what_is_done_is_not_done_again_and_what_broke_is() -> None:
    campaign = Campaign(scope=SCOPE)
    for seed, status in ((0, "passed"), (1, "failed"), (2, "broken")):
        task = Task(engine="vllm", seed=seed, status=status, attempts=1)  # type: ignore[arg-type]  # of three words
        campaign.tasks[task.key] = task
    assert campaign.missing(["vllm"], range(4)) == [("vllm", 2), ("vllm", 3)]
    assert campaign.missing(["vllm", "sglang"], range(1, 2)) == [("sglang", 1)]


def test_a_campaign_goes_on_where_it_was(tmp_path: Path) -> None:
    with opened(tmp_path, SCOPE) as campaign:
        campaign.add(FAILURE)
        write(tmp_path, campaign)
    with opened(tmp_path, SCOPE) as again:
        assert again == campaign


@pytest.mark.parametrize("field", ["suites", "drafters", "invariants", "tier"])
def test_another_scope_needs_another_folder(tmp_path: Path, field: str) -> None:
    write(tmp_path, Campaign(scope=SCOPE))
    other = replace(SCOPE, **{field: "fast" if field == "tier" else ("x",)})
    with pytest.raises(ValueError, match=rf"begun with {field}=.*choose another --out"), opened(tmp_path, other):
        pass


@pytest.mark.parametrize("text", ["{", "[]", '{"scope": 1}', '{"version": 7, "scope": %s}'])
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, text: str) -> None:
    write(tmp_path, Campaign(scope=SCOPE))
    known = (tmp_path / "campaign.json").read_text().partition('"scope":')[2].partition("}")[0] + "}"
    (tmp_path / "campaign.json").write_text(text.replace("%s", known))
    with pytest.raises(ValueError, match="move it away"), opened(tmp_path, SCOPE):
        pass


def test_two_campaigns_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        opened(tmp_path, SCOPE),
        pytest.raises(ValueError, match="another campaign runs there"),
        opened(tmp_path, SCOPE),
    ):
        pass


@given(cut=st.integers(0, 10_000))
def test_a_file_that_ends_anywhere_loses_its_last_line_alone(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "failures.jsonl"
    for seed in range(3):
        append(path, replace(FAILURE, seed=seed))
    size = path.stat().st_size
    line = size // 3
    os.truncate(path, cut % (size + 1))
    whole = (path.stat().st_size + 1) // line
    assert [failure.seed for failure in read_failures(path)] == list(range(whole))


def test_an_example_is_the_same_on_every_lane_and_in_every_process() -> None:
    notes = "Failing test case: test_rows(\n    lane=<{0} with {1}>,\n    batch=Batch(<Rule at 0x7f{2}>),\n)\n\nYou can"
    notes += " reproduce this test case"
    first, second = (example_of(notes.format("a", lane, place)) for lane, place in (("EAGLE", "01"), ("MTP", "ab")))
    assert first == second == "Failing test case: test_rows(\n    batch=Batch(<Rule>),\n)"


def test_several_faults_of_one_test_are_several_failures() -> None:
    inner = [ValueError("one"), ExceptionGroup("more", [KeyError("two"), TypeError("three")])]
    assert len(list(leaves(ExceptionGroup("all", inner)))) == 3


@pytest.mark.parametrize(("text", "seeds"), [("0:4", range(4)), ("7", range(7, 8)), ("5:6", range(5, 6))])
def test_seeds_are_a_range(text: str, seeds: range) -> None:
    assert seed_range(text) == seeds


@pytest.mark.parametrize("text", ["", "4:4", "5:4", "a:b", "1:2:3", "-1:4"])
def test_what_is_no_range_of_seeds_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="--seeds"):
        seed_range(text)


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"--address .*ray start --head"), started(1, address, 0.0):
            pass
