"""Files of results: whole or as they were, in folders that are tried first; and what the command says otherwise."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness import cli
from harness.report.places import require_folder, write_whole
from suites.registration import suite

suite(seconds=0.5, stage="cpu", needs="cpu")


@pytest.fixture
def little_room() -> Iterator[None]:
    """No file may grow beyond 1000 bytes, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("little_room")
def test_a_file_that_does_not_fit_stays_as_it_was(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "old")
    with pytest.raises(OSError, match="too large"):
        write_whole(tmp_path / "a", "new" * 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


@pytest.mark.usefixtures("little_room")
def test_a_folder_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--out .*: File too large; name a folder that can be written to$"):
        require_folder("--out", tmp_path / "new")


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    require_folder("--out", tmp_path / "some" / "where")
    assert list((tmp_path / "some" / "where").iterdir()) == []


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command says on stderr where it is given wrong input."""
    monkeypatch.setattr(sys, "argv", ["draftproof", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--out"],
        ["report", str(cli.ROOT / "ci" / "baselines"), "--out"],
        ["known-answer", "build", "--family", "coin"],
        ["matrix", "--drafter", "none", "--out"],
        ["mutants", "run", "hidden-rows-are-views", "--json"],
    ],
)
def test_a_place_that_cannot_be_written_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]
) -> None:
    """In one line, before anything has run."""
    (tmp_path / "file").write_text("")
    line = said(monkeypatch, capsys, *words, str(tmp_path / "file" / "below" / "it"))
    assert line.startswith("error: ")
    assert str(tmp_path / "file") in line
    assert "Not a directory" in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(("option", "value"), [("--seeds", "0"), ("--workers", "x"), ("--kernels", "cuda")])
def test_values_that_no_run_can_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    told = said(monkeypatch, capsys, "run", option, value)
    assert option in told


def test_the_matrix_says_where_it_was_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("harness.report.matrix.run", lambda _engine, _drafters: {"none": {}})
    monkeypatch.setattr("harness.report.matrix.page", lambda _engine, _rows: "the page")
    done = CliRunner().invoke(cli.app, ["matrix", "--out", str(tmp_path / "matrix.md")])
    assert done.stdout.split() == ["written:", str(tmp_path / "matrix.md")]
