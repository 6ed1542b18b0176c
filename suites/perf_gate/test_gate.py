"""What fails, what passes, and what the messages say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from ci.perf import baselines, gate
from ci.perf.gate import CONTROL, compare_counted, compare_names, judge_timed
from ci.perf.rule import Rule
from ci.perf.timed import Block, Pair, Recording
from suites.perf import refuse_workers
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")

FIGURES = {"engine/walk/none/target_forwards_per_token": 0.25, "engine/walk/EAGLE/accept_length": 3.5}


def kinds(now: dict[str, float]) -> dict[str, str]:
    return {finding.name.rpartition("/")[2]: finding.kind for finding in compare_counted(FIGURES, now)}


def test_equal_figures_pass() -> None:
    assert kinds(dict(FIGURES)) == {}


@pytest.mark.parametrize(
    ("figure", "value", "kind"),
    [
        ("engine/walk/none/target_forwards_per_token", 0.250001, "regression"),
        ("engine/walk/none/target_forwards_per_token", 0.249999, "gain"),
        ("engine/walk/EAGLE/accept_length", 3.499999, "regression"),
        ("engine/walk/EAGLE/accept_length", 3.500001, "gain"),
    ],
)
def test_any_difference_fails_and_says_in_which_direction(figure: str, value: float, kind: str) -> None:
    assert kinds({**FIGURES, figure: value}) == {figure.rpartition("/")[2]: kind}


def test_figures_that_depend_on_rounding_have_a_margin() -> None:
    name = "engine/random/none/target_forwards_per_token"
    assert list(compare_counted({name: 0.25}, {name: 0.2501})) == []
    assert [f.kind for f in compare_counted({name: 0.25}, {name: 0.26})] == ["regression"]


def test_a_figure_without_an_entry_fails_and_so_does_an_entry_without_a_figure() -> None:
    assert [(f.kind, f.name) for f in compare_names(["old", "both"], ["both", "new"])] == [
        ("missing", "new"),
        ("vanished", "old"),
    ]


def test_the_message_names_the_figure_both_values_and_the_command() -> None:
    (finding,) = compare_counted(FIGURES, {**FIGURES, "engine/walk/none/target_forwards_per_token": 0.5})
    for part in ("regression", "engine/walk/none/target_forwards_per_token", "0.25 -> 0.5", "draftproof perf accept"):
        assert part in str(finding)


def measuring(looks: Sequence[dict[str, float]], failures: dict[str, str] | None = None) -> gate.Measure:
    """Timings in which head takes so many times the time of base, look by look; a control that does not move."""
    left = list(looks)

    def measure(blocks: int, only: Sequence[str]) -> Recording:
        times = {name: factor for name, factor in left.pop(0).items() if not only or name in only}

        def pairs(factor: float, at: int) -> list[Pair]:
            noise = 1 + 0.001 * ((at * 7) % 5 - 2)
            return [Pair([0.01, 0.03], [0.01, (0.04 * factor * noise) - 0.01], [0.02], [0.02])] * 3

        taken = [
            Block(pairs={name: pairs(factor, at) for name, factor in {CONTROL: 1.0, **times}.items()})
            for at in range(blocks)
        ]
        return Recording(seed=0, blocks=taken, failures=failures or {})

    return measure


def timed(*looks: dict[str, float]) -> list[tuple[str, str]]:
    return [(finding.kind, finding.name) for finding in judge_timed(measuring(looks), Rule()).findings]


def test_a_slowdown_that_is_seen_twice_is_a_regression() -> None:
    assert timed({"a": 1.05, "b": 1.0}, {"a": 1.05}) == [("regression", "a")]


def test_a_gain_that_nobody_accepted_fails_too() -> None:
    assert timed({"a": 0.9, "b": 1.0}, {"a": 0.9}) == [("gain", "a")]


def test_what_the_second_look_does_not_see_or_sees_the_other_way_passes() -> None:
    assert timed({"a": 1.05}, {"a": 1.0}) == []
    assert timed({"a": 1.05}, {"a": 0.95}) == []


def test_nothing_is_looked_at_twice_without_a_suspicion() -> None:
    """A second look would find the list of looks empty."""
    assert timed({"a": 1.0, "b": 1.004}) == []


def test_a_benchmark_that_could_not_be_measured_fails() -> None:
    outcome = judge_timed(measuring([{"a": 1.0}], {"b": "base: ImportError: no such name"}), Rule())
    assert [(finding.kind, finding.name) for finding in outcome.findings] == [("failed", "b")]
    assert "ImportError" in str(outcome.findings[0])


def test_a_baseline_is_read_as_it_was_written_a_figure_a_line(tmp_path: Path) -> None:
    made = baselines.made_here("cpu", FIGURES, {"engine/walk/none": 2.5})
    path = tmp_path / "cpu.json"
    baselines.write(made, path)
    assert baselines.read(path) == made
    assert '  "engine/walk/none/target_forwards_per_token": 0.25' in path.read_text()
    assert set(made.sources) == {"reference_engine", "kernels", "harness"}


def test_a_baseline_that_is_missing_or_wrong_is_named_with_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    with pytest.raises(ValueError, match=r"cpu\.json.*perf accept"):
        baselines.read(path)
    path.write_bytes(msgspec.json.encode({"runner_class": "cpu", "counted": {"a": "many"}}))
    with pytest.raises(ValueError, match=r"cpu\.json.*perf accept"):
        baselines.read(path)


def test_benchmarks_and_workers_together_are_refused(pytester: pytest.Pytester) -> None:
    with pytest.raises(pytest.UsageError, match="leave -n out"):
        refuse_workers(pytester.parseconfig("-m", "perf", "-n", "2"))
    refuse_workers(pytester.parseconfig("-m", "perf"))
    refuse_workers(pytester.parseconfig("-m", "not perf", "-n", "2"))
