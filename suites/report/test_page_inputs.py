"""`draftproof report`: files are known by what is in them, and one that cannot be read is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.report import page
from harness.report.page.inputs import Unrecognised
from suites.registration import suite
from suites.report.html_tree import parse
from suites.report.page_data import baselines, kill_matrix, outcome, record, scorecard

suite(seconds=0.9, stage="cpu", needs="cpu")


def test_names_do_not_matter(tmp_path: Path) -> None:
    files = [
        scorecard(tmp_path / "one.json", outcome("pass", "EAGLE", "ALIAS-1")),
        kill_matrix(tmp_path / "two.json"),
        baselines(tmp_path / "three.json", 1.0),
    ]
    found = page.read(files)
    assert (len(found.cards), len(found.zoos), len(found.points)) == (1, 1, 1)
    assert [line.partition(": ")[2] for line in found.sources] == [
        "scorecard of 1 cell",
        "kill matrix of 3 mutants",
        "baselines of 1 commit",
    ]


def test_a_folder_is_searched_and_other_files_are_passed_over(tmp_path: Path) -> None:
    record(tmp_path / "deep" / "traces" / "EAGLE-1", "EAGLE", "walk")
    scorecard(tmp_path / "build" / "scorecard.json", outcome("pass", "EAGLE", "ALIAS-1"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "notes.txt").write_text("{")
    found = page.read([tmp_path])
    assert [one.label for one in found.recordings] == ["EAGLE-1"]
    assert len(found.sources) == 2


ENDLESS = {"name": "a", "stats": {"min": 0.0, "q1": 0.0, "median": 0.0, "q3": 0.0, "max": float("inf")}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"engine": "reference", "drafter": "EA', "not a whole file of JSON"),
        ("", "not a whole file of JSON"),
        ("\x00\x01", "not a whole file of JSON"),
        ('{"benchmarks": NaN, "machine_info": {}}', "NaN is no number of JSON"),
        (json.dumps({"benchmarks": [ENDLESS], "machine_info": {}}).replace("Infinity", "1e999"), "`float` <= 1"),
        ("<testsuites><testsuite>", "not a whole file of XML"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><testsuites/>", "has no document type"),
        (
            '[{"engine": "e", "drafter": "d", "invariant": "i", "status": "good"}]',
            "not a scorecard: Invalid enum value",
        ),
        ('[{"engine": "e", "drafter": "d", "invariant": 7, "status": "pass"}]', "not a scorecard: Expected `str`"),
        ('{"mutants": [{}], "controls": []}', "not a kill matrix: Object missing required field"),
        ('{"benchmarks": 3, "machine_info": {}}', "not benchmark results: Expected `array`"),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["by name", "in a folder"])
def test_a_file_that_is_cut_or_broken_is_named(tmp_path: Path, text: str, words: str, inside: bool) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=words) as told:
        page.read([tmp_path if inside else file])
    assert str(file) in str(told.value)


@pytest.mark.parametrize(
    "text", ["[]", "{}", "3", '{"model_type": "llama"}', "[1, 2]", "<html></html>", '[{"timed": {}}]']
)
def test_a_file_of_another_form_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(Unrecognised, match=r"other\.json: .* give a scorecard\.json, a folder with a recorded run"):
        page.read([file])
    with pytest.raises(ValueError, match="nothing in this folder belongs into a report"):
        page.read([tmp_path])


def test_a_trace_that_is_cut_is_named(tmp_path: Path) -> None:
    folder = record(tmp_path / "EAGLE-1", "EAGLE", "walk")
    lines = (folder / "trace.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "trace.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"EAGLE-1/trace\.jsonl: the end is missing"):
        page.read([tmp_path])


def test_baselines_are_read_as_they_come(tmp_path: Path) -> None:
    one = {"date": "2026-11-02", "commit": "b", "timed": {"EAGLE": {"ratio": 1.5, "note": "quiet"}}}
    other = {"date": "2026-11-01", "runner_class": "gpu-1", "counted": {"pages": 3, "ok": True}}
    for number, value in enumerate((one, [other], {"entries": [one, {"version": 1}]})):
        (tmp_path / f"{number}.json").write_text(json.dumps(value))
    points = page.read([tmp_path]).points
    assert [(p.runner, p.date, dict(p.figures)) for p in points] == [
        ("", "2026-11-02", {"timed / EAGLE / ratio": 1.5}),
        ("gpu-1", "2026-11-01", {"counted / pages": 3.0}),
        ("", "2026-11-02", {"timed / EAGLE / ratio": 1.5}),
    ]


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    card = scorecard(tmp_path / "s.json", outcome("fail", "EAGLE", "ALIAS-1"))
    out = tmp_path / "new" / "report.html"
    done = CliRunner().invoke(app, ["report", str(card), "--out", str(out), "--title", "Ours & theirs"])
    assert done.exit_code == 0, done.output
    assert f"{out}: " in done.output.replace("\n", "")
    document = parse(out.read_text(encoding="utf-8"))
    assert document.all("h1")[0].text == "Ours & theirs"
    assert "ALIAS-1" in document.text


def test_the_command_names_a_file_that_there_is_not(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path / "nothing.json")])
    assert isinstance(done.exception, ValueError)
    assert "nothing.json: there is no such file or folder" in str(done.exception)
    assert CliRunner().invoke(app, ["report", "--family", "nobody"]).exit_code == 2


def test_a_trace_file_stands_for_its_folder(tmp_path: Path) -> None:
    folder = record(tmp_path / "EAGLE-1", "EAGLE", "walk")
    assert page.read([folder / "trace.jsonl"]).recordings == page.read([folder]).recordings
    shutil.rmtree(tmp_path / "known")
