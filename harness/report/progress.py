"""pytest plugin of `draftproof run` on a terminal: a bar in place of dots, and red tests as they come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ON_A_TERMINAL = ("-p", "harness.report.progress", "-o", "console_output_style=classic")
"""What pytest is told to have it."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Bar(Console()), "draftproof-progress")


class Bar:
    """Drawn by hand after each test: while a test runs its output is captured, and a bar would end up there."""

    def __init__(self, console: Console) -> None:
        columns = (
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[red]} red"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(
            *columns, console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self.task = self.progress.add_task("", total=None, red=0)
        self.red = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.progress.update(self.task, total=len(session.items) or None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.progress.update(self.task, total=len(ids))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Counted by pytest, and not printed."""
        if report.when != "call" and report.passed:
            return None
        failed = "failed" if report.when == "call" else "error"
        return (failed if report.failed else report.outcome), "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.progress.start()
        if report.failed:
            self.red += 1
            self.progress.console.print(f"✗ {report.nodeid}", style="red", markup=False, highlight=False)
        if report.failed or report.when == "teardown":
            self.progress.update(self.task, advance=int(report.when == "teardown"), red=self.red)
            self.progress.refresh()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.progress.stop()
