"""pytest plugin of a campaign's runs (`-p ci.campaign_plugin`): failures are on the disk as soon as they are seen."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from ci.campaign_state import Failure, append

PR_SET_PDEATHSIG = 1
FAILURES, RUNNING, SUMMARY = "failures.jsonl", "running.json", "summary.json"
_DECORATOR = re.compile(r"@reproduce_failure\(.*?\)(?= as a decorator|\n|$)")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("draftproof campaign")
    group.addoption("--run-folder", type=Path, required=True, help="where this run writes")
    group.addoption("--worker-pid", type=int, required=True, help="end when that process does")


def pytest_configure(config: pytest.Config) -> None:
    end_with(config.getoption("--worker-pid"))
    config.pluginmanager.register(Recorder(config), "draftproof-campaign")


def end_with(pid: int) -> None:
    """A seed whose worker is gone is given to another one: it must not run twice at a time."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != pid:
        pytest.exit(f"worker {pid} is gone", returncode=pytest.ExitCode.INTERRUPTED)


class Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.folder: Path = config.getoption("--run-folder")
        self.examples = 0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Names the culprit when the process dies of a test."""
        (self.folder / RUNNING).write_text(json.dumps(nodeid), encoding="utf-8")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            # Only where something failed: it imports torch.
            from harness.invariants.base import leaves

            for error in leaves(call.excinfo.value):
                append(self.folder / FAILURES, self._failure(item, error))
        if report.when == "call":
            self.examples += sum(int(str(value)) for name, value in item.user_properties if name == "examples")
        return report

    def _failure(self, item: pytest.Item, error: BaseException) -> Failure:
        from harness.report import reproduce
        from harness.report.marks import invariant_ids, lane_of

        notes = "\n".join(getattr(error, "__notes__", ()))
        decorator = _DECORATOR.search(notes)
        return Failure(
            engine=self.config.getoption("--engine"),
            invariants=invariant_ids(item),
            drafter=lane_of(item) or "-",
            test=item.nodeid.partition("[")[0],
            message=(str(error).strip() or type(error).__name__)[:4000],
            seed=int(self.config.getoption("hypothesis_seed")),
            example=example_of(notes),
            decorator=decorator.group() if decorator else "",
            reproduce=reproduce.command(self.config, item.nodeid),
        )

    def pytest_sessionfinish(self) -> None:
        (self.folder / SUMMARY).write_text(json.dumps({"examples": self.examples}), encoding="utf-8")


def example_of(notes: str) -> str:
    """The falsifying example among the notes of an exception, the same for every lane and process."""
    told = notes.partition("\n\nYou can reproduce")[0].partition("You can reproduce")[0]
    told = re.sub(r"^ *lane=<.*>,\n", "", told, flags=re.MULTILINE)
    return re.sub(r" at 0x[0-9a-f]+", "", told).strip()
