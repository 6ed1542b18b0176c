"""The comment on a pull request tells which cells differ, and shows nothing that foreign code made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ci import comparison
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")

SHA = "c" * 40


def cell(invariant: str, status: str, **fields: Any) -> dict[str, Any]:
    return {"engine": "reference", "drafter": "EAGLE", "invariant": invariant, "status": status, "tests": 1} | fields


def scorecard(folder: Path, shard: str, cells: Any) -> None:
    path = folder / f"suites-cpu-{shard}" / "scorecard.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(cells if isinstance(cells, str) else json.dumps(cells), encoding="utf-8")


def compared(tmp_path: Path) -> str:
    out = tmp_path / "comment.md"
    arguments = ["--base", str(tmp_path / "base"), "--head", str(tmp_path / "head"), "--sha", SHA, "--out", str(out)]
    assert comparison.main(arguments) == 0
    return out.read_text(encoding="utf-8")


def test_cells_that_differ_are_listed(tmp_path: Path) -> None:
    scorecard(tmp_path / "base", "1", [cell("COUNT-1", "pass"), cell("KV-1", "pass"), cell("LAW-1", "fail")])
    scorecard(tmp_path / "head", "1", [cell("COUNT-1", "fail"), cell("KV-1", "pass"), cell("GRAM-1", "pass")])
    told = compared(tmp_path)
    assert told.startswith(comparison.MARKER)
    assert SHA in told
    assert "3 cells: 1 fail, 2 pass." in told
    assert "| `reference` | `EAGLE` | `COUNT-1` | pass | fail |" in told
    assert "| `reference` | `EAGLE` | `LAW-1` | fail | - |" in told
    assert "| `reference` | `EAGLE` | `GRAM-1` | - | pass |" in told
    assert "KV-1" not in told


def test_shards_are_put_together_with_the_worst_of_each_cell(tmp_path: Path) -> None:
    scorecard(tmp_path / "base", "1", [cell("COUNT-1", "pass"), cell("KV-1", "pass")])
    scorecard(tmp_path / "head", "1", [cell("COUNT-1", "pass"), cell("KV-1", "error", tests=0)])
    scorecard(tmp_path / "head", "2", [cell("COUNT-1", "error"), cell("KV-1", "pass")])
    told = compared(tmp_path)
    assert "| `COUNT-1` | pass | error |" in told
    assert "KV-1" not in told


def test_nothing_differs(tmp_path: Path) -> None:
    for side in ("base", "head"):
        scorecard(tmp_path / side, "1", [cell("COUNT-1", "pass")])
    assert "No cell differs from the main branch." in compared(tmp_path)


def test_a_side_without_scorecards_is_said(tmp_path: Path) -> None:
    scorecard(tmp_path / "head", "1", [cell("COUNT-1", "pass")])
    assert "The main branch has no scorecard" in compared(tmp_path)
    (tmp_path / "head").rename(tmp_path / "base")
    assert "No scorecard was written" in compared(tmp_path)


@pytest.mark.parametrize(
    "hostile",
    [
        cell("COUNT-1", "pass", engine="@everyone look"),
        cell("COUNT-1", "pass", drafter="EAGLE`](https://bad.example)"),
        cell("COUNT-1 | <script>", "pass"),
        cell("COUNT-1", "splendid"),
        cell("COUNT-1", "pass", engine="x" * 61),
        cell("COUNT-1", "pass", engine=["reference"]),
        "a string",
        None,
    ],
)
def test_what_is_not_of_the_form_that_a_run_writes_is_left_out(tmp_path: Path, hostile: Any) -> None:
    scorecard(tmp_path / "base", "1", [cell("KV-1", "pass")])
    scorecard(tmp_path / "head", "1", [cell("KV-1", "pass", message="@everyone <b>"), hostile])
    told = compared(tmp_path)
    assert "1 entries of the scorecards are not of the form" in told
    assert "No cell differs" in told
    for text in ("everyone", "bad.example", "<b>", "script", "splendid", "xxx"):
        assert text not in told


@pytest.mark.parametrize("text", ["", "{}", "[" * 100_000, '"text"', "\x00"])
def test_a_file_that_is_no_scorecard_breaks_nothing(tmp_path: Path, text: str) -> None:
    scorecard(tmp_path / "head", "1", text)
    assert "No scorecard was written" in compared(tmp_path)


def test_a_link_or_a_file_without_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorecard(tmp_path / "head", "1", [cell("COUNT-1", "pass")])
    secret = tmp_path / "head" / "suites-cpu-2"
    secret.mkdir()
    (secret / "scorecard.json").symlink_to(tmp_path / "head" / "suites-cpu-1" / "scorecard.json")
    assert comparison.read(tmp_path / "head")[1] == 1
    monkeypatch.setattr(comparison, "LARGEST", 10)
    assert comparison.read(tmp_path / "head") == ({}, 2)


def test_a_long_comparison_is_cut(tmp_path: Path) -> None:
    scorecard(tmp_path / "base", "1", [cell("KV-1", "pass")])
    many = [cell(f"X-{index}", "fail") for index in range(10_000)]
    scorecard(tmp_path / "head", "1", many)
    told = compared(tmp_path)
    assert len(told) < 10_000
    assert f"And {10_001 - comparison.ROWS} more." in told
