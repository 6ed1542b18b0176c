"""General mutants: the operators do what they are called, on everything that runs and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.mutants import general, survey
from harness.mutants.equivalent import EQUIVALENT
from harness.mutants.general import Change, changes
from harness.mutants.runs import Laboratory
from suites.registration import suite

suite(seconds=2.6, stage="cpu", needs="cpu")

MODULE = '''
"""A docstring with 1 < 2."""
LIMIT = 3


def pick(rows: list[int] = [1], first: int = 1) -> list[int]:
    """min(1, 2)"""
    assert first > 0, "a + b"
    rows.sort()
    if first < len(rows) and not rows[0]:
        return rows[first:].copy()
    return [max(row, 0) for row in rows]
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "m.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setattr(general, "source_of", lambda _name: tmp_path / "m.py")
    return "m"


def told(found: list[Change]) -> set[tuple[str, str, str]]:
    return {(change.operator, change.before, change.after) for change in found}


def test_each_operator_changes_one_thing(module: str) -> None:
    found = list(changes(module))
    assert told(found) == {
        ("removed call", "rows.sort()", "pass"),
        ("comparison", "first < len(rows)", "first <= len(rows)"),
        ("logic", "first < len(rows) and not rows[0]", "first < len(rows) or not rows[0]"),
        ("logic", "not rows[0]", "rows[0]"),
        ("off-by-one", "0", "1"),
        ("dropped copy", "rows[first:].copy()", "rows[first:]"),
        ("swapped index", "rows[first:]", "rows[:]"),
        ("removed call", "max(row, 0)", "min(row, 0)"),
    }
    for change in found:
        compile(change.source, change.id, "exec")
        assert change.source.count("\n") == MODULE.count("\n")
    assert len({change.id for change in found}) == len(found)


@pytest.mark.parametrize("family", survey.families())
def test_every_change_is_a_program_of_its_own(family: str) -> None:
    found = survey.changes_of(family)
    assert len({change.source for change in found}) == len(found)
    assert len({change.id for change in found}) == len(found) > 100
    for change in found:
        compile(change.source, change.id, "exec")


def test_what_is_listed_as_equivalent_is_still_there() -> None:
    known = {change.id for family in survey.families() for change in survey.changes_of(family)}
    assert set(EQUIVALENT) <= known
    assert all(EQUIVALENT.values())


def test_a_family_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="must be one of verification"):
        survey.changes_of("nothing")


@pytest.mark.full
def test_a_survey_kills_what_a_kernels_tests_see(laboratory: Laboratory) -> None:
    (found,) = survey.survey(laboratory, "kernels", match="verify_chain_greedy:reference: draft_tokens == ")
    assert found.killer.startswith("suites/kernels/test_verify_chain_greedy.py::")
    assert survey.total([found]) == (1, 0, 0)
