"""The zoo itself: every mutant can be made, says whom it stands for, and together they cover the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.mutants import FAMILIES, BadMutant, Edit, Mutant, family, from_folder, zoo
from harness.mutants.base import ROOT, edited_sources
from harness.mutants.catalogue import bug, bugs
from harness.workloads.lanes import LANES, catalogue
from suites.registration import suite

suite(seconds=0.8, stage="cpu", needs="cpu")

FORM = """
from harness.mutants import Edit, Mutant

MUTANTS = (
    Mutant(
        id="mine",
        fault="Nothing is wrong.",
        bugs=(),
        lanes=("none",),
        red=("COUNT-1",),
        edits=(Edit("reference_engine.output", "class SpecStats:", "class SpecStats:  # mine"),),
    ),
)
"""


@pytest.mark.parametrize("mutant", zoo().values(), ids=lambda mutant: mutant.id)
def test_a_mutant_can_be_made_and_names_what_there_is(mutant: Mutant) -> None:
    for module, text in edited_sources(mutant.edits).items():
        compile(text, module, "exec")
    assert mutant.bugs
    for bug_id in mutant.bugs:
        bug(bug_id)
    assert set(mutant.lanes) <= set(LANES)
    assert mutant.expected <= set(catalogue())
    for invariant in mutant.red:
        assert LANES[mutant.lanes[0]].applies(invariant)
    assert all((ROOT / suite.partition("::")[0]).exists() for suite in mutant.suites)


def test_ids_are_unique() -> None:
    assert len(zoo()) == sum(len(family(name)) for name in FAMILIES)


def test_every_class_of_the_catalogue_is_represented() -> None:
    assert {one.bug_class for one in bugs().values()} == {bug(b).bug_class for one in zoo().values() for b in one.bugs}


def test_every_drafter_is_represented() -> None:
    assert {mutant.lanes[0] for mutant in zoo().values()} >= set(LANES) - {"none"}


def test_there_are_enough() -> None:
    assert len(zoo()) >= 80


def test_silent_ones_are_many() -> None:
    """Most stand for a bug that nobody would have noticed by an error."""
    silent = [one for one in zoo().values() if any(bug(b).shows in "WP" for b in one.bugs)]
    assert len(silent) > 0.75 * len(zoo())


@pytest.mark.parametrize(
    ("module", "old", "message"),
    [
        ("reference_engine.nothing", "x", "none of that name"),
        ("reference_engine.output", "no such text", "occurs 0 times"),
        ("reference_engine.output", "request", "occurs [0-9]+ times"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(module: str, old: str, message: str) -> None:
    with pytest.raises(BadMutant, match=message):
        edited_sources((Edit(module, old, "y"),))


def test_edits_of_one_module_add_up() -> None:
    edits = (
        Edit("reference_engine.output", "class SpecStats:", "class First:"),
        Edit("reference_engine.output", "class First:", "class Second:"),
    )
    (text,) = edited_sources(edits).values()
    assert "class Second:" in text


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FORM, encoding="utf-8")
    assert list(from_folder(tmp_path)) == ["mine"]


@pytest.mark.parametrize(("text", "message"), [(None, "no Python file"), ("MUTANTS = [1]", "must define MUTANTS")])
def test_a_folder_without_mutants_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    with pytest.raises(BadMutant, match=message):
        from_folder(tmp_path)


def test_the_catalogue_resolves_and_says_how_many_there_are() -> None:
    assert len(bugs()) == 286
    assert all("#" in one.threads for one in bugs().values())
