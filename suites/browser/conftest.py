"""The report in a browser: collected when it is asked for (`make browser`), free of cost otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    expression = config.option.markexpr
    asked = "browser" in expression and "not browser" not in expression
    return True if collection_path.suffix == ".py" and not asked else None


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert program is not None, "there is no chromium on the path: apt-get install chromium"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=OPTIONS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each form: two versions of an engine, one of which is wrong, and recorded runs."""
    from harness.workloads.lanes import LANES, catalogue
    from suites.report.page_data import baselines, kill_matrix, outcome, record, scorecard

    root = tmp_path_factory.mktemp("inputs")
    for version, wrong in (("0.9", ()), ("1.0", ("ALIAS-1", "LAW-2"))):
        cells = []
        for lane, spec in LANES.items():
            for name in filter(spec.applies, catalogue()):
                status = "refused" if lane == "MEDUSA" else "fail" if name in wrong and spec.topk > 1 else "pass"
                cells.append(outcome(status, lane, name, engine="toy", examples=17))  # type: ignore[arg-type]  # a Status
        scorecard(root / version / "scorecard.json", *cells, version=version)
    for lane in ("EAGLE", "EAGLE-tree", "NGRAM"):
        record(root / "traces" / f"{lane}-1", lane)
    record(root / "traces" / "EAGLE-neighbours", "EAGLE", neighbours=True)
    kill_matrix(root / "zoo.json")
    baselines(root / "baselines.json", 0.31, 0.31, 0.30, 0.36, pages=12.0)
    names = ("EAGLE", "STANDALONE", "none")
    spreads = [
        {"min": m, "q1": m * 1.1, "median": m * 1.2, "q3": m * 1.4, "max": m * 2.0, "rounds": 9}
        for m in (0.01, 0.02, 0.5)
    ]
    told = [
        {
            "name": f"test_step[{name}]",
            "stats": spread,
            "extra_info": {"tokens_per_second": 9 / spread["median"], "p95": 0.1},
        }
        for name, spread in zip(names, spreads, strict=True)
    ]
    (root / "benchmark.json").write_text(json.dumps({"machine_info": {"python_version": "3.11"}, "benchmarks": told}))
    cases = "".join(f'<testcase classname="suites.x.test_{i}" name="t" time="{2.5 / (i + 1)}"/>' for i in range(12))
    (root / "junit.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    return root


@pytest.fixture(scope="session")
def report(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from harness.report import page

    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page.page(page.read([inputs]), "Two versions of toy", "2026-12-01"), encoding="utf-8")
    return path
