"""The search for the first bad commit."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from ci.perf import trees
from ci.perf.bisect import Search, Sources, Yardstick, commits_between
from ci.perf.rule import Rule
from ci.perf.workplace import workplace
from suites.perf_gate.test_planted import PLANTS, copy_of_source, edit
from suites.registration import suite
from suites.tiers import FULL

suite(seconds=0.2, stage="cpu", needs="cpu")

COMMITS = [f"{number:02}" for number in range(20)]


def search(first_bad: int, broken: tuple[int, ...] = ()) -> tuple[list[str], list[str]]:
    """What is found, and what was measured on the way."""
    tried: list[str] = []

    def measure(commit: str) -> float:
        tried.append(commit)
        if int(commit) in broken:
            raise ValueError("does not import")
        return math.log(1.10) if int(commit) >= first_bad else 0.002

    return Search(commits=COMMITS, measure=measure, bad=math.log(1.10) / 2).first(), tried


@pytest.mark.parametrize("first_bad", range(len(COMMITS)))
def test_the_first_bad_commit_is_found_wherever_it_is(first_bad: int) -> None:
    found, tried = search(first_bad)
    assert found == [COMMITS[first_bad]]
    assert len(tried) <= 5


def test_commits_that_cannot_be_measured_are_passed_by() -> None:
    found, _ = search(7, broken=(3, 9, 12))
    assert found == ["07"]


def test_commits_right_before_it_that_cannot_be_measured_stay_under_suspicion() -> None:
    found, _ = search(7, broken=(5, 6))
    assert found == ["05", "06", "07"]


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(root: Path, message: str) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message", message)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, list[str]]:
    """A repository with the measured folders, nearly empty, and three commits."""
    root = tmp_path / "repository"
    for part in trees.PARTS:
        (root / part).mkdir(parents=True)
        (root / part / "__init__.py").write_text("")
    git(root, "init", "--quiet")
    commits = [commit(root, "first")]
    (root / "kernels" / "new.py").write_text("VALUE = 1\n")
    commits += [commit(root, "second"), commit(root, "third")]
    return root, commits


def test_the_range_is_oldest_first_without_the_good_one(small: tuple[Path, list[str]]) -> None:
    root, commits = small
    assert commits_between(commits[0], commits[2], root) == commits[1:]


def test_a_range_that_goes_backwards_or_nowhere_is_refused(small: tuple[Path, list[str]]) -> None:
    root, commits = small
    with pytest.raises(ValueError, match="ancestor"):
        commits_between(commits[2], commits[0], root)
    with pytest.raises(ValueError, match="no commit in between"):
        commits_between(commits[2], commits[2], root)


def test_sources_are_those_of_the_commit(small: tuple[Path, list[str]], tmp_path: Path) -> None:
    root, commits = small
    sources = Sources(folder=tmp_path / "sources", root=root)
    assert not (sources.of(commits[0]) / "kernels" / "new.py").exists()
    assert (sources.of(commits[1]) / "kernels" / "new.py").read_text() == "VALUE = 1\n"


@FULL
def test_a_copy_that_a_commit_added_is_traced_to_it(tmp_path: Path) -> None:
    root = copy_of_source(tmp_path / "repository")
    shutil.copy(trees.ROOT / ".gitignore", root)
    git(root, "init", "--quiet")
    commits = [commit(root, f"commit {number}") for number in range(3)]
    file, old, new, figure = PLANTS["a copy of the KV that is read"]
    edit(root, file, old, new)
    commits += [commit(root, "the bad one"), commit(root, "another")]
    with workplace(Console()) as place:
        stick = Yardstick(
            good=commits[0], sources=Sources(folder=tmp_path / "sources", root=root), place=place, rule=Rule()
        )
        name, size, measure = stick.what_differs(commits[-1], f"engine/walk/none/{figure}")
        found = Search(commits=commits_between(commits[0], commits[-1], root), measure=measure, bad=size / 2).first()
    assert found == [commits[3]]
    assert name.endswith(figure)
