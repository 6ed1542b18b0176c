"""pytest plugin of `draftproof run`: how far it is and red tests as they come, in place of dots. A bar on a terminal,
now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SHOWN = ("-p", "harness.report.progress", "-o", "console_output_style=classic")
"""What pytest is told to have it."""

LINES, PAUSE, LEAST = 10, 30.0, 1.0
"""A log gets a line for each tenth of the tests, and after so many seconds without one; none within the least of them
after another, but for the last."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        console = Console()
        shown = Bar(console) if console.is_interactive else Log(console)
        config.pluginmanager.register(shown, "draftproof-progress")


class Progressing:
    """Counts tests. Told by hand after each of them: while a test runs its output is captured, and what is told would
    end up there."""

    def __init__(self, console: Console) -> None:
        self.console, self.total, self.done, self.red, self.interrupted = console, 0, 0, 0, False

    def begun(self) -> None:
        """The number of tests is known."""

    def tell(self) -> None:
        """A test is over."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._take(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._take(len(ids))

    def _take(self, total: int) -> None:
        """Each worker collects the same tests, and the process that has workers none."""
        if total and not self.total:
            self.total = total
            self.begun()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Counted by pytest, and not printed."""
        if report.when != "call" and report.passed:
            return None
        failed = "failed" if report.when == "call" else "error"
        outcome = failed if report.failed else report.outcome
        return outcome, "", outcome.upper()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.red += 1
            self.say(f"✗ {report.nodeid}", style="red")
        self.done += report.when == "teardown"
        if report.failed or report.when == "teardown":
            self.tell()

    def say(self, line: str, style: str = "") -> None:
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
        # A pipe would keep it until there are some kilobytes.
        self.console.file.flush()

    def pytest_keyboard_interrupt(self) -> None:
        self.interrupted = True

    def pytest_terminal_summary(self) -> None:
        if self.interrupted:
            self.say(f"interrupted after {self.done} of {self.total} tests")


class Bar(Progressing):
    def __init__(self, console: Console) -> None:
        super().__init__(console)
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

    def tell(self) -> None:
        self.progress.start()
        self.progress.update(self.task, total=self.total or None, completed=self.done, red=self.red)
        self.progress.refresh()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.progress.stop()


class Log(Progressing):
    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.start = self.last = time.monotonic()

    def begun(self) -> None:
        self.say(f"{self.total} tests")

    def tell(self) -> None:
        now = time.monotonic()
        tenth = self.total and self.done * LINES // self.total > (self.done - 1) * LINES // self.total
        if self.done == self.total or now - self.last >= (LEAST if tenth else PAUSE):
            self.last = now
            minutes, seconds = divmod(round(now - self.start), 60)
            self.say(f"{self.done} of {self.total} tests, {self.red} red, {minutes}:{seconds:02d}")
