"""The adapter of docs/adapters.md: the page shows it as it is, and it runs where the page says that it may lie."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.contract import Action, Refused, Request, SamplingParams
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.scenarios import plain
from harness.workloads.verdicts import at_the_end
from suites.registration import suite

suite(seconds=18, stage="cpu", needs="cpu")

ROOT = Path(__file__).resolve().parents[2]
CONFORMANCE = ROOT / "suites" / "conformance"
PAGE = ROOT / "docs" / "adapters.md"
FILE = Path(__file__).with_name("example_adapter.py")
COMMAND = """
import sys
from pathlib import Path
from harness import cli
cli.SUITE = Path(sys.argv.pop(1))
cli.main()
"""
"""`draftproof` with a part of the conformance suite."""
WALK = vocabulary("walk")


def shown() -> str:
    """The one block of Python on the page that is a whole file."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    (whole,) = [block for block in blocks if block.startswith('"""')]
    return str(whole)


def test_the_page_shows_the_file() -> None:
    assert shown() == FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("tests", "cells"),
    [("test_shape.py", {"SHAPE-1": "refused", "SHAPE-2": "pass"}), ("test_logp.py", {"LOGP-1": "refused"})],
)
def test_it_runs_from_the_folder_in_which_it_lies(tmp_path: Path, tests: str, cells: dict[str, str]) -> None:
    """And what needs an observation that it does not claim is refused."""
    (tmp_path / "my_adapter.py").write_text(shown(), encoding="utf-8")
    arguments = ["run", "--engine", "my_adapter:ToyFactory", "--drafter", "STANDALONE", "--workers", "0"]
    asked = [word for name in cells for word in ("--invariant", name)]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(CONFORMANCE / tests), *arguments, *asked, "--out", str(tmp_path / "out")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "out" / "scorecard.json").read_text(encoding="utf-8"))
    assert {cell["invariant"]: cell["status"] for cell in told} == cells


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Lane:
    return Lane("suites.engines.example_adapter:ToyFactory", LANES["STANDALONE"], tmp_path_factory.mktemp("known"))


def test_what_it_does_not_tell_is_not_held_against_it(toy: Lane) -> None:
    """It gives accept lengths and not how much was drafted: those are for ACCEPT-1, which needs no more."""
    requests = plain(WALK, (3, 7), (12, 9))
    run = toy.run(requests)
    assert all(done.accept_lens and done.draft_lens is None for done in run.completions)
    assert at_the_end(toy, run, toy.baseline(requests), "walk") == []


@pytest.mark.parametrize("fields", [{"return_hidden_states": True}, {"sampling": SamplingParams(temperature=0.5)}])
def test_what_it_does_not_claim_is_refused(toy: Lane, fields: dict[str, Any]) -> None:
    asked = Request(request_id="a", prompt_token_ids=WALK.prompt(3, 0), **fields)
    with pytest.raises(Refused, match="not served"):
        toy.run([asked])
    with toy.start() as engine, pytest.raises(Refused, match="pause"):
        engine.run(plain(WALK, (3,), (4,)), actions=[Action(step=0, name="pause")])


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-tree", "NGRAM"])
def test_drafters_that_it_has_not_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused, match="only chains of STANDALONE"):
        Lane("suites.engines.example_adapter:ToyFactory", LANES[name], tmp_path).knock()
