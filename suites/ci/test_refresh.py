"""Estimates that are off are reported, and rewritten from measured times without a change to anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import refresh, registry
from suites.registration import suite

suite(seconds=0.5, stage="cpu", needs="cpu")

BEFORE = """\
from suites.registration import suite  # é

suite(stage='cpu', needs="cpu", seconds={seconds}) # twelve, or so
suite(seconds=12, stage="gpu", needs="1-gpu")

SECONDS = 12
"""


def repository(root: Path, seconds: str) -> Path:
    (root / "suites").mkdir(exist_ok=True)
    file = root / "suites" / "test_thing.py"
    file.write_bytes(BEFORE.format(seconds=seconds).replace("\n", "\r\n").encode())
    return file


def junit(path: Path, cases: dict[tuple[str, str], float]) -> Path:
    lines = [f'<testcase classname="{module}" name="{name}" time="{time}"/>' for (module, name), time in cases.items()]
    path.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>", encoding="utf-8")
    return path


def refreshed(root: Path, seconds: dict[str, float], stage: str = "cpu") -> list[refresh.Change]:
    found = refresh.changes(registry.must_read(root), seconds, stage)
    refresh.rewrite(found, root)
    return found


@pytest.mark.parametrize("wrong", ["48", "3"])
def test_an_estimate_that_is_wrong_by_four_is_reported_and_corrected(tmp_path: Path, wrong: str) -> None:
    file = repository(tmp_path, wrong)
    (change,) = refreshed(tmp_path, {"suites/test_thing.py": 12.04})
    assert change.reported
    assert change.factor == pytest.approx(4, rel=0.01)
    assert str(change).startswith(f"suites/test_thing.py: {wrong} s were estimated for stage 'cpu', 12.04 s measured")
    assert file.read_bytes().decode() == BEFORE.format(seconds=12).replace("\n", "\r\n")
    assert refreshed(tmp_path, {"suites/test_thing.py": 12.04}) == []


def test_one_that_is_about_right_stays(tmp_path: Path) -> None:
    repository(tmp_path, "12")
    assert refreshed(tmp_path, {"suites/test_thing.py": 10.0}) == []
    assert refreshed(tmp_path, {"suites/test_elsewhere.py": 99.0}) == []


def test_one_that_is_off_by_less_than_two_is_corrected_without_a_word(tmp_path: Path) -> None:
    file = repository(tmp_path, "12")
    (change,) = refreshed(tmp_path, {"suites/test_thing.py": 20.0})
    assert not change.reported
    assert "seconds=20) # twelve" in file.read_text(encoding="utf-8")


def test_times_of_one_stage_leave_the_others_alone(tmp_path: Path) -> None:
    file = repository(tmp_path, "12")
    refreshed(tmp_path, {"suites/test_thing.py": 99.0}, "gpu")
    assert file.read_bytes().decode() == BEFORE.format(seconds=12).replace("\n", "\r\n").replace(
        'seconds=12, stage="gpu"', 'seconds=99, stage="gpu"'
    )


def test_junit_files_of_all_shards_are_added_up_by_file(tmp_path: Path) -> None:
    repository(tmp_path, "12")
    module = "suites.test_thing"
    one = junit(tmp_path / "1.xml", {(module, "test_a[1]"): 1.5, (f"{module}.TestClass", "test_b"): 2.0})
    two = junit(
        tmp_path / "2.xml", {(module, "test_a[1]"): 1.0, (module, "test_c"): 4.0, ("suites.gone", "test_"): 8.0}
    )
    assert refresh.measured([one, two], tmp_path) == {"suites/test_thing.py": 7.5}


def test_a_json_of_seconds_by_file_is_read_too(tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    times.write_text('{"suites/test_thing.py": 3}', encoding="utf-8")
    assert refresh.measured([times], tmp_path) == {"suites/test_thing.py": 3.0}


@pytest.mark.parametrize(("name", "text"), [("t.xml", "<testsuites>"), ("t.json", "[1]"), ("t.json", '{"a": "b"}')])
def test_a_file_of_neither_form_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{name}: is neither JUnit XML nor a JSON object"):
        refresh.measured([tmp_path / name])


@pytest.mark.parametrize(("seconds", "text"), [(0.02, "0.1"), (0.26, "0.3"), (9.96, "10"), (3.0, "3"), (123.4, "123")])
def test_estimates_have_no_more_digits_than_they_are_worth(seconds: float, text: str) -> None:
    assert refresh.literal(seconds) == text
