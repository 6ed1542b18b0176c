"""The conformance suite on a server over HTTP: the lane without a drafter passes, one whose tokens are wrong does not,
and a server that runs already answers for the one checkpoint that it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.contract import DrafterSetup, EngineSetup, Refused, Request
from harness.engines.openai import OpenAIFactory
from harness.workloads.known import Checkpoints, vocabulary
from suites.engines.openai.arrange import FAKE, ServerProcess, server_file
from suites.registration import suite

suite(seconds=25, stage="cpu", needs="cpu")

ROOT = Path(__file__).resolve().parents[3]
TESTS = [f"suites/conformance/test_{name}.py" for name in ("count", "finish", "logp")]


def cells(file: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """What the lane `none` comes to, by invariant."""
    scorecard = folder / "scorecard.json"
    only = [part for name in ("COUNT-1", "FINISH-1", "LOGP-1") for part in ("--invariant", name)]
    command = [sys.executable, "-m", "pytest", *TESTS, "--engine", f"openai@{file}", "--drafter", "none", *only]
    command += ["-q", "-p", "no:cacheprovider", "--scorecard", str(scorecard), f"--basetemp={folder / 'tmp'}"]
    environment = {**os.environ, "CI": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    return {cell["invariant"]: cell for cell in json.loads(scorecard.read_text(encoding="utf-8"))}


def test_the_lane_without_a_drafter_passes(tmp_path: Path) -> None:
    found = cells(server_file(tmp_path), tmp_path)
    for name in ("COUNT-1", "FINISH-1", "LOGP-1"):
        assert found[name]["status"] == "pass", found[name]
        assert found[name]["version"] == "1"


def test_wrong_tokens_are_found(tmp_path: Path) -> None:
    found = cells(server_file(tmp_path, "wrong_token"), tmp_path)
    assert found["FINISH-1"]["status"] == "fail"


WALK = vocabulary("walk")
RUNS = """
address = "{address}"
ids = "token_ids"
[serves]
target = "{target}"
context_length = 128
{more}
"""


@contextmanager
def running(target: Path) -> Iterator[str]:
    """A server that somebody else has started -> its address."""
    command = [sys.executable, str(FAKE), "--target", "{target}", "--port", "{port}", "--dtype", "float32"]
    server = ServerProcess(command, {"target": str(target)}, {}, "/health", patience=20.0)
    try:
        yield server.address
    finally:
        server.stop()


def attached(folder: Path, address: str, target: Path, more: str = "") -> OpenAIFactory:
    file = folder / "running.toml"
    file.write_text(RUNS.format(address=address, target=target, more=more), encoding="utf-8")
    return OpenAIFactory(str(file))


def test_a_server_that_runs_is_asked_about_what_it_serves(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    target = checkpoints.directory("walk", "float32") / "target"
    other = checkpoints.directory("law", "float32") / "target"
    with running(target) as address:
        factory = attached(tmp_path, address, target)
        engine = factory.start(EngineSetup(target=target, context_length=128))
        request = Request(request_id="q", prompt_token_ids=WALK.prompt(4, 1))
        assert engine.run([request]).completions[0].token_ids == WALK.continue_(request.prompt_token_ids, 16)
        engine.close()
        for setup, told in (
            (EngineSetup(target=other, context_length=128), r"target=.*law.*: the server at http.*serves"),
            (EngineSetup(target=target, context_length=64), "context_length=64: .* was started with 128"),
            (EngineSetup(target=target, context_length=128, prefix_cache=False), "prefix_cache=False: .* runs already"),
            (EngineSetup(target=target, context_length=128, dtype="bfloat16"), "dtype='bfloat16'"),
            (
                EngineSetup(target=target, context_length=128, drafter=DrafterSetup.chain("NGRAM", 3)),
                r"drafter=\('NGRAM', 3\): .* drafts with none",
            ),
        ):
            with pytest.raises(Refused, match=told):
                factory.start(setup)
        factory.close()


def test_a_server_that_drafts_is_asked_with_its_drafter_alone(tmp_path: Path) -> None:
    target = Checkpoints(tmp_path).directory("walk", "float32") / "target"
    with running(target) as address:
        more = '[serves.drafter]\nmethod = "NGRAM"\nnum_steps = 3'
        factory = attached(tmp_path, address, target, more)
        setup = EngineSetup(target=target, context_length=128, drafter=DrafterSetup.chain("NGRAM", 3))
        engine = factory.start(setup)
        assert engine.capabilities.drafters == {"NGRAM"}
        engine.close()
        with pytest.raises(Refused, match=r"drafter=none: .* drafts with \('NGRAM', 3\)"):
            factory.start(EngineSetup(target=target, context_length=128))
        factory.close()
