"""What is explained is not filtered away: it stays red, and the run fails on everything else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from harness.engines import recipes
from harness.engines.server_file import presets
from harness.invariants import INVARIANTS
from harness.report.findings import ANY, FILE, Finding, objections, read
from harness.workloads.lanes import LANES, catalogue
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

ROWS = Finding(
    id="V9", engine="toy", versions=("1.0",), kind="fault", title="rows of a neighbour", cells={"EAGLE": ("ALIAS-1",)}
)


def cell(drafter: str, invariant: str, status: str) -> dict[str, Any]:
    return {"drafter": drafter, "invariant": invariant, "status": status, "message": f"{status}: why\nmore"}


OVER_HTTP = Finding(
    id="V10",
    engine="openai@toy",
    versions=("1.0",),
    kind="fault",
    title="steps that were none",
    cells={"EAGLE": ("ACCEPT-1",)},
)


def told(
    *cells: dict[str, Any], finding: Finding = ROWS, version: str = "1.0", engine: str = "toy@/opt/venv/bin/python"
) -> list[str]:
    return objections(cells, [finding], engine, version)


def test_a_red_cell_that_is_explained_is_no_objection() -> None:
    assert told(cell("EAGLE", "ALIAS-1", "fail"), cell("none", "EQUAL-1", "pass")) == []


@pytest.mark.parametrize(
    ("drafter", "invariant", "status", "version"),
    [
        ("EAGLE", "EQUAL-1", "fail", "1.0"),
        ("MTP", "ALIAS-1", "fail", "1.0"),
        ("EAGLE", "ALIAS-1", "error", "1.0"),
        ("EAGLE", "ALIAS-1", "fail", "2.0"),
    ],
    ids=["another invariant", "another drafter", "not a verdict", "another version"],
)
def test_anything_else_is(drafter: str, invariant: str, status: str, version: str) -> None:
    shown = cell("EAGLE", "ALIAS-1", "fail")
    found = told(shown, cell(drafter, invariant, status), version=version)
    assert f"{invariant} {drafter}: {status} and not explained: {status}: why" in found


def test_a_finding_that_nothing_shows_any_more_is() -> None:
    (only,) = told(cell("EAGLE", "ALIAS-1", "pass"))
    assert only.startswith("V9: rows of a neighbour: no cell shows it any more")


def test_but_not_where_it_did_not_run_or_shows_only_sometimes() -> None:
    assert told(cell("EAGLE", "ALIAS-1", "refused")) == []
    sometimes = Finding(**{name: getattr(ROWS, name) for name in ROWS.__struct_fields__} | {"sometimes": True})
    assert told(cell("EAGLE", "ALIAS-1", "pass"), finding=sometimes) == []


def test_any_lane() -> None:
    everywhere = Finding(
        **{name: getattr(ROWS, name) for name in ROWS.__struct_fields__} | {"cells": {ANY: ("CONF-2",)}}
    )
    assert told(cell("MTP", "CONF-2", "fail"), finding=everywhere) == []


def test_what_is_wrong_with_an_engine_is_wrong_over_http_too() -> None:
    shown, served = cell("EAGLE", "ALIAS-1", "fail"), "openai@toy@/opt/venv/bin/python"
    assert told(shown, engine=served) == []
    assert told(shown, engine=served, version="2.0") == ["ALIAS-1 EAGLE: fail and not explained: fail: why"]
    assert told(shown, engine="openai@other") == ["ALIAS-1 EAGLE: fail and not explained: fail: why"]


def test_where_it_need_not_show() -> None:
    assert told(cell("EAGLE", "ALIAS-1", "pass"), engine="openai@toy") == []


def test_what_shows_over_http_only_is_of_no_other_engine() -> None:
    shown = cell("EAGLE", "ACCEPT-1", "fail")
    assert told(shown, finding=OVER_HTTP, engine="openai@toy") == []
    assert told(shown, finding=OVER_HTTP) == ["ACCEPT-1 EAGLE: fail and not explained: fail: why"]
    (only,) = told(cell("EAGLE", "ACCEPT-1", "pass"), finding=OVER_HTTP, engine="openai@toy@1.0")
    assert only.startswith("V10: steps that were none: no cell shows it any more")


def test_a_file_that_does_not_fit_is_told(tmp_path: Path) -> None:
    (tmp_path / "findings.toml").write_text('[[finding]]\nid = "V1"\n')
    with pytest.raises(ValueError, match=r"findings\.toml: Object missing required field"):
        read(tmp_path / "findings.toml")


def test_every_finding_is_told_in_the_page_and_names_what_there_is() -> None:
    page = (FILE.parents[1] / "docs" / "findings.md").read_text(encoding="utf-8")
    findings = read()
    assert [one.id for one in findings] == re.findall(r"^### ([A-Z]+\d+):", page, flags=re.MULTILINE)
    for one in findings:
        assert one.engine in {*recipes(), *(f"openai@{name}" for name in presets())}
        assert set(one.cells) <= {ANY, *LANES}
        assert {name for names in one.cells.values() for name in names} <= {*catalogue(), *INVARIANTS}


def test_what_shows_a_finding_is_a_conformance_test_on_a_lane_of_it() -> None:
    for one in read():
        for test in one.shown_by:
            found = re.fullmatch(r"(test_\w+\.py)::(test_\w+)\[(EAGLE-tree|\w+)\b.*\]", test)
            assert found is not None, test
            name, function, lane = found.groups()
            source = (FILE.parents[1] / "suites" / "conformance" / name).read_text(encoding="utf-8")
            assert f"def {function}(" in source, test
            assert lane in one.cells or ANY in one.cells, test
