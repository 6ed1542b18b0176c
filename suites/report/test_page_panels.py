"""Each panel shows what the files say, and is not there when they say nothing of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.contract import Run
from harness.known_answer.census import CensusTarget
from harness.record import read as read_run
from harness.record import write
from harness.report import page
from harness.report.page.acceptance import acceptances
from harness.report.page.differences import differences
from harness.report.page.inputs import Inputs
from harness.report.page.page import PANELS
from harness.report.page.provenance import draw, wrong_rows
from harness.report.page.recordings import Block, Recording, Row, Strip
from harness.report.page.trees import examples
from harness.report.page.trends import series
from harness.report.scorecard import Scorecard
from suites.registration import suite
from suites.report.html_tree import Element, parse
from suites.report.page_data import REPRODUCER, VIOLATION, baselines, kill_matrix, outcome, record, scorecard

suite(seconds=2.1, stage="cpu", needs="cpu")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page") / "traces"
    for lane in ("EAGLE", "EAGLE-tree"):
        record(root / lane, lane)
    record(root / "neighbours", "EAGLE", neighbours=True)
    return root


def shown(found: Inputs) -> Element:
    return parse(page.page(found, "a title"))


def section(document: Element, name: str) -> Element:
    (found,) = document.all("section", id=name)
    return found


def sections(document: Element) -> list[str]:
    return [str(one.attributes["id"]) for one in document.all("section", class_="panel")]


def one_of(found: Inputs, label: str) -> Recording:
    return next(one for one in found.recordings if one.label == label)


def test_a_panel_without_data_is_not_there(tmp_path: Path, traces: Path) -> None:
    assert [make(Inputs()) for make in PANELS] == [None] * len(PANELS)
    card = scorecard(tmp_path / "scorecard.json", outcome("pass", "EAGLE", "ALIAS-1"))
    assert sections(shown(page.read([card]))) == ["scorecards"]
    assert sections(shown(page.read([traces]))) == ["provenance", "acceptance", "trees"]
    assert sections(shown(page.read([kill_matrix(tmp_path / "zoo.json")]))) == ["zoo"]
    assert sections(shown(page.read([baselines(tmp_path / "baselines.json", 1.0)]))) == ["trends"]


def test_a_scorecard_has_a_symbol_in_each_cell_and_a_way_to_what_was_seen(tmp_path: Path) -> None:
    card = scorecard(
        tmp_path / "scorecard.json",
        outcome("pass", "none", "ALIAS-1", examples=17),
        outcome("fail", "EAGLE", "ALIAS-1"),
        outcome("refused", "NGRAM", "ALIAS-1", message="refused: drafter.method='NGRAM': not built in"),
        outcome("error", "MTP", "COUNT-1"),
        version="1.2",
    )
    document = shown(page.read([card]))
    cells = {
        (one.attributes["data-drafter"], one.attributes["data-status"]): one
        for one in document.all("td", class_="cell")
        if "data-status" in one.attributes
    }
    assert {key: one.text for key, one in cells.items()} == {
        ("none", "pass"): "✓ 17",
        ("EAGLE", "fail"): "✗ 1",
        ("NGRAM", "refused"): "⊘ refused",
        ("MTP", "error"): "! 1",
    }
    targets = {str(one.attributes["id"]): one for one in document.walk() if "id" in one.attributes}
    links = [link for one in cells.values() for link in one.all("a")]
    assert len(links) == 3
    assert all(str(link.attributes["href"])[1:] in targets for link in links)
    (fail,) = cells["EAGLE", "fail"].all("a")
    details = targets[str(fail.attributes["href"])[1:]]
    assert details.all("pre")[0].text == VIOLATION
    commands = [one.text for one in details.all("div", class_="command") for one in one.all("pre")]
    assert commands == [REPRODUCER]
    assert "not built in" in section(document, "scorecards").text
    (line,) = document.all("ul", class_="summary")
    assert re.search(
        r"✗ fail\s+reference 1\.2\s+4 cells: ✓ 1 pass, ✗ 1 fail, ! 1 error, ⊘ 1 refused; 17 examples", line.text
    )


def test_an_engine_that_refuses_everything_has_not_passed(tmp_path: Path) -> None:
    document = shown(page.read([scorecard(tmp_path / "s.json", outcome("refused", "EAGLE", "ALIAS-1"))]))
    (line,) = document.all("ul", class_="summary")
    assert "⊘ refused" in line.text


def test_a_card_says_that_it_is_a_part_of_a_run(tmp_path: Path) -> None:
    cards = []
    for number, part in enumerate(("", "--drafter EAGLE --invariant ALIAS-1")):
        made = Scorecard(part=part)
        made.add(outcome("pass", "EAGLE", "ALIAS-1", engine=f"engine-{number}"))
        cards.append(tmp_path / f"{number}.json")
        made.write(cards[-1])
    (lines,) = shown(page.read(cards)).all("ul", class_="summary")
    whole, _, narrowed = lines.text.partition("engine-1")
    assert "a part of a run" not in whole
    assert "a part of a run: --drafter EAGLE --invariant ALIAS-1" in narrowed


def test_a_red_cell_that_a_finding_explains_says_so(tmp_path: Path) -> None:
    red = outcome("fail", "STANDALONE", "CONF-2", engine="vllm")
    found = page.read([scorecard(tmp_path / "s.json", red, version="0.32.0")])
    known = [one for one in found.findings if one.engine == "vllm" and one.explains("STANDALONE", "CONF-2")]
    document = shown(found)
    assert known
    assert all(one.title in section(document, "scorecards").text for one in known)
    assert "1 of the red explained" in document.text


def test_differences_between_two_runs(tmp_path: Path) -> None:
    before = scorecard(
        tmp_path / "a" / "s.json",
        outcome("pass", "EAGLE", "ALIAS-1"),
        outcome("pass", "MTP", "ALIAS-1"),
        outcome("pass", "none", "ALIAS-1"),
    )
    after = scorecard(
        tmp_path / "b" / "s.json", outcome("fail", "EAGLE", "ALIAS-1"), outcome("pass", "MTP", "ALIAS-1", examples=2)
    )
    found = page.read([before, after])
    assert [card.name for card in found.cards] == ["reference", "reference (b)"]
    told, same = differences(found)
    assert [(one.drafter, one.everywhere) for one in told] == [("EAGLE", True), ("none", False)]
    assert same == 1
    assert "1 cell changed between 2 scorecards" in section(shown(found), "differences").text


def test_one_scorecard_that_is_read_twice_is_shown_once(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        scorecard(tmp_path / folder / "scorecard.json", outcome("pass", "EAGLE", "ALIAS-1"))
    found = page.read([tmp_path])
    assert len(found.cards) == 1
    assert "differences" not in sections(shown(found))


def test_acceptance_is_a_recount_of_the_engines_own_counters(traces: Path) -> None:
    for lane in ("EAGLE", "EAGLE-tree"):
        run = read_run(traces / lane)
        (one,) = acceptances([one_of(page.read([traces / lane]), lane)])
        assert run.counters is not None
        assert (one.lane, one.k, one.runs) == (lane, 3, 1)
        assert one.accepted == run.counters.accepted_per_position
        assert sum(count for count in one.histogram.values()) == one.steps
        assert sum((length - 1) * count for length, count in one.histogram.items()) == run.counters.num_accepted_tokens
    rows = section(shown(page.read([traces])), "acceptance").all("tr")
    assert [row.all("th")[0].text for row in rows[1:]] == ["EAGLE", "EAGLE-tree"]


def follows(run: Run, block: Block) -> bool:
    """Whether the block is what the request got behind its root."""
    done = run.of(block.owner)
    tokens = (*done.prompt_token_ids, *done.token_ids)
    got = [block.root, *(block.drafts[node - 1] for node in block.path), block.last]
    return any(list(tokens[place : place + len(got)]) == got[: len(tokens) - place] for place in range(len(tokens)))


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-tree"])
def test_the_accepted_path_is_what_was_emitted(traces: Path, name: str) -> None:
    run, blocks = read_run(traces / name), one_of(page.read([traces / name]), name).blocks
    assert all(follows(run, block) for block in blocks)
    lens = [done.accept_lens or () for done in run.completions]
    assert sorted(len(block.path) + 1 for block in blocks) == sorted(length for of_one in lens for length in of_one)
    for block in blocks:
        assert all(
            block.parents[node - 1] == parent for parent, node in zip((0, *block.path), block.path, strict=False)
        )
    is_tree = any(len(set(block.parents)) < len(block.parents) for block in blocks)
    assert is_tree == (name == "EAGLE-tree")


def test_trees_are_drawn_with_every_draft_and_the_path_marked(traces: Path) -> None:
    (one,) = page.read([traces / "EAGLE-tree"]).recordings
    chosen = examples([(one.label, block) for block in one.blocks])
    assert {len(block.path) for block in chosen} == {len(block.path) for block in one.blocks}
    pictures = section(shown(page.read([traces / "EAGLE-tree"])), "trees").all("svg")
    assert len(pictures) == len(chosen)
    for block, picture in zip(chosen, pictures, strict=True):
        assert len(picture.all("circle")) == sum(token >= 0 for token in block.drafts)
        assert len(picture.all("circle", class_="on")) == len(block.path)
        assert len(picture.all("polygon")) == 1


def test_every_row_of_a_sound_run_is_its_own(traces: Path) -> None:
    (one,) = page.read([traces / "EAGLE-tree"]).recordings
    assert [len(strip.rows) for strip in one.strips] == [16, 20, 17, 16]
    assert one.wrong_rows == 0
    text = section(shown(page.read([traces / "EAGLE-tree"])), "provenance").text
    assert "69 are right, 0 are not" in text
    assert "✓ all right" in text


def test_a_row_of_the_neighbour_is_drawn_from_where_it_belongs(traces: Path) -> None:
    (one,) = page.read([traces / "neighbours"]).recordings
    told, more = wrong_rows(one.strips)
    # The prompts have 3 and 9 tokens: output rows 0 to 3 of r1 are those of r0.
    assert [row[:3] for row in told] == [("r1", 9 + i, f"row {3 + i} of r0") for i in range(4)]
    assert more == 0
    owners = CensusTarget(seed=0).alphabets.owner
    alphabet = owners[read_run(traces / "neighbours").of("r0").token_ids[0]]
    assert all(row[3].endswith(f"of alphabet {alphabet}") for row in told)
    (picture,) = section(shown(page.read([traces / "neighbours"])), "provenance").all("svg")
    assert [len(picture.all("rect", class_="wrong")), len(picture.all("path", class_="arrow"))] == [4, 4]
    assert {sign.text for sign in picture.all("text", class_="sign")} == {"A"}


def test_without_a_known_family_nothing_is_said_about_rows(traces: Path, tmp_path: Path) -> None:
    line, rest = (traces / "EAGLE" / "trace.jsonl").read_text(encoding="utf-8").split("\n", 1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "trace.jsonl").write_text(line.replace("/census/", "/llama/") + "\n" + rest, encoding="utf-8")
    (tmp_path / "other" / "tensors.safetensors").write_bytes((traces / "EAGLE" / "tensors.safetensors").read_bytes())
    assert page.read([tmp_path]).recordings[0].strips == ()
    assert page.read([tmp_path], "census").recordings[0].wrong_rows == 0
    assert page.read([tmp_path], "census").recordings[0].strips != ()


def test_a_run_of_which_no_row_is_known_is_left_out(tmp_path: Path) -> None:
    """A check wrote over what it was given, or it is another family."""
    run = read_run(record(tmp_path / "first", "EAGLE"))
    for done in run.completions:
        assert done.hidden_states is not None
        for row in (done.hidden_states.prefill, *done.hidden_states.decode):
            row.fill_(7.0)
    write(run, tmp_path / "traces" / "overwritten")
    found = page.read([tmp_path / "traces"])
    assert found.recordings[0].wrong_rows > 0
    assert "provenance" not in sections(shown(found))


def test_no_arrow_starts_where_a_row_might_have_come_from_several_places() -> None:
    mine, other = Strip("r0", 1, (Row(("r0", 0)),)), ("r0", 0)
    for others, arrows in ((0, 1), (1, 0)):
        picture = parse(draw([mine, Strip("r1", 0, (Row(other, others=others),))], "a run"))
        assert len(picture.all("path", class_="arrow")) == arrows
        assert picture.all("text", class_="sign")[0].text == "A"


BENCHMARK = """
import time

def test_decode(benchmark):
    benchmark.pedantic(time.sleep, args=(0.001,), rounds=5)
    benchmark.extra_info.update(tokens_per_second={"reference": 900.0, "transformers": 90.0}, p95=0.004)
"""


def test_benchmarks_and_the_time_of_each_file(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # in a worker, pytest-benchmark writes nothing
    pytester.makepyfile(BENCHMARK)
    pytester.makeini("[pytest]")
    files = [pytester.path / "benchmark.json", pytester.path / "junit.xml"]
    assert (
        pytester.runpytest_inprocess(f"--benchmark-json={files[0]}", f"--junitxml={files[1]}", "-p", "no:xdist").ret
        == 0
    )
    found = page.read(files)
    timing = section(shown(found), "timing")
    labels = [str(one.attributes["aria-label"]) for one in timing.all("svg")]
    assert [label.partition(":")[0] for label in labels] == ["Latency", "Throughput", "Time by test file"]
    assert re.search(r"test_decode: median [\d.]+ ms", labels[0])
    assert (
        "test_decode: tokens_per_second / reference: 900; test_decode: tokens_per_second / transformers: 90"
        in labels[1]
    )
    assert [(one.tests, one.seconds > 0) for one in found.sessions[0].files] == [(1, True)]
    assert "p95" in timing.text


def test_trends_tell_what_changed_last(tmp_path: Path) -> None:
    found = page.read([baselines(tmp_path / "baselines.json", 0.30, 0.30, 0.36)])
    first, second = series(found.points, "cpu-2")
    assert (first.name, first.change) == ("counted / target forwards per token", pytest.approx(0.2))
    assert (second.name, second.change) == ("timed / EAGLE speed-up", 0.0)
    text = section(shown(found), "trends").text
    assert "0.36, +20.0%" in text
    assert "1.5, unchanged" in text
    assert "2026-11-01 to 2026-11-03" in text


def test_the_zoo_says_who_saw_what(tmp_path: Path) -> None:
    found = page.read([kill_matrix(tmp_path / "zoo.json")])
    panel = section(shown(found), "zoo")
    killed, wrong, survived = found.zoos[0].mutants
    assert "2 of 3 mutants killed" in panel.text
    rows = {row.all("th")[0].text: row for row in panel.all("tr")[1:]}
    assert [one.text for one in rows[killed.id].all("td", class_="must")] == ["X"] * len(killed.red)
    assert len(rows[wrong.id].all("td", class_="wrong")) == 1
    assert [one.text for one in rows[survived.id].all("td", class_="missed")] == ["-"] * len(survived.red)
    assert killed.fault
    assert killed.fault in panel.text
