"""The page as a whole: one file, nothing from outside, whatever names and messages hold."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.contract import Capabilities, Completion, EngineSetup, HiddenStates, Request, Run, Usage
from harness.record import read as read_run
from harness.record import write
from harness.report import page
from harness.report.page import palette
from harness.report.page.base import duration, short, visible
from harness.report.page.svg import ticks
from harness.workloads.known import hidden_rows, known_family
from harness.workloads.lanes import LANES, catalogue
from suites.registration import suite
from suites.report.html_tree import Element, parse
from suites.report.page_data import VIOLATION, baselines, kill_matrix, outcome, record, scorecard

suite(seconds=0.5, stage="cpu", needs="cpu")

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;{{ 7 * 7 }}\x1b[31m\x00\u202e\ud800"
LITERALLY = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;{{ 7 * 7 }}\\u0000\\u202e\\ud800"
POLICY = "Content-Security-Policy"


def everything(root: Path, words: str = "a word") -> list[Path]:
    """A file of each form, with the words wherever somebody else chooses them."""
    red = outcome("fail", words, words, engine=words, nodeid=words, message=words, reproduce=words)
    refused = outcome("refused", "EAGLE", "ALIAS-1", engine=words, message=words)
    zoo = json.loads(kill_matrix(root / "zoo.json").read_text(encoding="utf-8"))
    for one in zoo["mutants"]:
        one.update(id=words, fault=words, bugs=[words], faults=[words], red=[words])
        one["trial"].update(lanes=[words], ended=words, kills=[{"invariant": words, "test": words, "message": words}])
    (root / "zoo.json").write_text(json.dumps(zoo), encoding="utf-8")
    spread = {"min": 0.1, "q1": 0.2, "median": 0.3, "q3": 0.4, "max": 0.5}
    benchmarks = {
        "machine_info": {"cpu": {"brand_raw": words}},
        "benchmarks": [{"name": words, "stats": spread, "extra_info": {words: 1.0, "tokens_per_second": {words: 2.0}}}],
    }
    (root / "benchmarks.json").write_text(json.dumps(benchmarks), encoding="utf-8")
    named = baselines(root / "baselines.json", 1.0, 2.0, **{words: 3.0})
    told = [
        {**entry, "runner class": words, "commit": words} for entry in json.loads(named.read_text(encoding="utf-8"))
    ]
    named.write_text(json.dumps(told), encoding="utf-8")
    cards = [
        scorecard(root / "a.json", red, refused, version=words),
        scorecard(root / "b.json", replace(red, status="error"), refused),
    ]
    drawn = recorded(root / "EAGLE-tree", words)
    return [*cards, root / "zoo.json", root / "benchmarks.json", named, trace(root / "trace", words), drawn]


def recorded(folder: Path, words: str) -> Path:
    """A run with trees, of an engine of that name."""
    run = read_run(record(folder.parent / "plain", "EAGLE-tree", "walk"))
    named = replace(run.capabilities, engine=words.replace("\ud800", "?"))
    return write(replace(run, capabilities=named), folder)


def trace(folder: Path, words: str) -> Path:
    """A black box that answered one request of that name, with a row that is nobody's."""
    words = words.replace("\ud800", "?")  # no surrogate can be written into a trace
    target = known_family("census").target
    tokens = (*target.prompt(4, 0), 7, 9)
    rows = hidden_rows(target, tokens[:-1]).clone()
    rows[4] += 1.0
    done = Completion(
        request_id=words,
        prompt_token_ids=tokens[:4],
        token_ids=tokens[4:],
        finish_reason="length",
        usage=Usage(4, 2),
        hidden_states=HiddenStates(rows[:4], (rows[4],)),
        accept_lens=(2,),
        draft_lens=(1,),
    )
    claims = Capabilities(engine=words, version=words, drafters=frozenset(), features=frozenset())
    drafter = LANES["STANDALONE"].drafter(1, Path(), None)
    setup = EngineSetup(target=Path("known/census/target"), drafter=drafter)
    request = Request(request_id=words, prompt_token_ids=tokens[:4], return_hidden_states=True)
    return write(Run(setup=setup, capabilities=claims, requests=(request,), completions=(done,)), folder)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of hostile files."""
    return page.page(page.read(everything(tmp_path_factory.mktemp("hostile"), HOSTILE)), HOSTILE, HOSTILE)


@pytest.fixture(scope="module")
def document(html: str) -> Element:
    return parse(html)


def test_nobodys_words_become_markup(document: Element) -> None:
    tags = {one.tag for one in document.walk()}
    assert not tags & {"img", "iframe", "object", "link", "base", "foreignobject", "image", "use"}
    assert len(document.all("script")) == len(document.all("style")) == 1
    handlers = [name for one in document.walk() for name in one.attributes if name.startswith("on")]
    assert handlers == []
    assert "49" not in document.all("title")[0].text
    assert document.all("title")[0].text == LITERALLY


def test_they_are_shown_as_they_are_wherever_they_stand(document: Element) -> None:
    for panel in document.all("section", class_="panel"):
        assert LITERALLY[:16] in panel.text, panel.attributes["id"]
    written = json.dumps(
        [one.text for one in document.walk()] + [list(one.attributes.values()) for one in document.walk()]
    )
    assert not re.search(r"\\u(001b|0000|202e|d800)", written.replace("\\\\u", ""))


def test_a_hostile_page_can_be_written_and_read(html: str) -> None:
    assert html.encode("utf-8").decode("utf-8") == html


def test_all_panels_are_in_it(document: Element) -> None:
    panels = [one.attributes["id"] for one in document.all("section", class_="panel")]
    assert panels == ["scorecards", "differences", "provenance", "acceptance", "trees", "timing", "trends", "zoo"]
    links = [one.attributes["href"] for one in document.all("nav")[0].all("a")]
    assert links == [f"#{panel}" for panel in panels]


def test_nothing_comes_from_outside(document: Element) -> None:
    for one in document.walk():
        for name in ("src", "href", "srcset", "action", "data", "poster", "formaction", "xlink:href"):
            assert (one.attributes.get(name) or "#").startswith("#"), (one.tag, one.attributes)
        assert "style" not in one.attributes
    style, script = document.all("style")[0].text, document.all("script")[0].text
    assert not re.search(r"url\(|@import|//", style)
    assert not re.search(r"fetch|XMLHttpRequest|WebSocket|import\(|innerHTML|eval|://", script)


def test_the_policy_lets_only_this_style_and_this_script_through(document: Element) -> None:
    (policy,) = [str(one.attributes["content"]) for one in document.all("meta", http_equiv=POLICY)]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for tag in ("style", "script"):
        digest = hashlib.sha256(document.all(tag)[0].text.encode()).digest()
        assert rules[f"{tag}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"


def test_ids_are_distinct_and_links_lead_somewhere(document: Element) -> None:
    ids = [one.attributes["id"] for one in document.walk() if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    led = [str(one.attributes["href"])[1:] for one in document.all("a")]
    led += [
        str(one.attributes[name])
        for one in document.walk()
        for name in ("aria-labelledby", "data-open")
        if name in one.attributes
    ]
    assert set(led) <= set(ids)


def test_what_is_drawn_and_what_scrolls_has_a_name(document: Element) -> None:
    assert document.all("html")[0].attributes["lang"] == "en"
    drawings = document.all("svg")
    assert drawings
    assert all(one.attributes["role"] == "img" and one.attributes["aria-label"] for one in drawings)
    scrolling = document.all("div", class_="scroll")
    assert all(one.has(tabindex="0", role="region") and one.attributes["aria-label"] for one in scrolling)
    for table in document.all("table"):
        assert table.attributes.get("class")
        assert all("scope" in head.attributes for head in table.all("th"))


@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_contrast(colours: dict[str, str]) -> None:
    """WCAG AA: 4.5 for words; 3 for marks in a drawing."""
    poor = {(text, behind): palette.contrast(colours[text], colours[behind]) for text, behind in palette.PAIRS}
    assert {pair: ratio for pair, ratio in poor.items() if ratio < 4.5} == {}
    assert palette.contrast(colours["fill"], colours["panel"]) >= 2.4
    assert set(palette.LIGHT) == set(palette.DARK)


def test_contrast_is_that_of_the_standard() -> None:
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert palette.contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)


def test_colours_are_those_of_the_palette(document: Element) -> None:
    style = document.all("style")[0].text
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", style)) <= set(palette.LIGHT)
    laid_on = {text for text, _ in palette.PAIRS}
    assert set(re.findall(r"(?<![-\w])color: var\(--([a-z0-9-]+)\)", style)) <= laid_on


def test_a_whole_run_of_two_engines_stays_small(tmp_path: Path) -> None:
    """A tenth of the cells red, each with three failures of four thousand characters."""
    for engine in ("vllm@0.32.0", "vllm@0.31.0"):
        cells = [
            outcome(
                "fail" if (number + place) % 10 == 0 else "pass",
                lane,
                name,
                engine=engine,
                nodeid=f"suites/x.py::test_{repeat}[{lane}]",
                **({"message": f"{repeat} " + (VIOLATION + "\n") * 16} if (number + place) % 10 == 0 else {}),
            )
            for number, lane in enumerate(LANES)
            for place, name in enumerate(catalogue())
            for repeat in range(3)
        ]
        scorecard(tmp_path / engine / "scorecard.json", *cells)
    found = page.read([tmp_path])
    assert [len(card.cells) for card in found.cards] == [len(LANES) * len(catalogue())] * 2
    assert len(page.page(found, "both").encode()) < 2_000_000


def test_numbers_and_words_for_people() -> None:
    assert [short(value) for value in (0.0, 0.012345, 12.0, 1234567.8)] == ["0", "0.01235", "12", "1\u2009234\u2009568"]
    assert [duration(value) for value in (0.0, 2e-7, 0.0015, 3.0, 150.0)] == [
        "0 ns",
        "200 ns",
        "1.5 ms",
        "3 s",
        "2.5 min",
    ]
    assert visible("\x1b[31mred\x1b[0m\ttab\nline\x07") == "red\ttab\nline\\u0007"
    assert ticks(0.0, 1.0, 4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(3.0, 3.0) == [3.0]
