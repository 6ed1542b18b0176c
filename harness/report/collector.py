"""pytest hooks that turn test reports into the scorecard; works with and without xdist."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from harness.report import reproduce
from harness.report.marks import invariant_ids, lane_of
from harness.report.roll import DIED, Roll
from harness.report.scorecard import Outcome, Scorecard, Status

_PROPERTY = "draftproof"
_SUITE = Path("suites") / "conformance"


class ScorecardCollector:
    """Workers attach an `Outcome` to each report of a test marked `invariant`; the controller adds them up."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.scorecard = Scorecard()
        self.is_worker = hasattr(config, "workerinput")
        self.interrupted = False
        self.left_out = self.written = ""
        self.roll = Roll(config)
        config.pluginmanager.register(self.roll, "draftproof-roll")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self.is_worker:
            self.roll.call(session.items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Count the examples that hypothesis really executes."""
        handle = getattr(getattr(item, "obj", None), "hypothesis", None)
        if handle is None or not invariant_ids(item):
            return (yield)
        inner, count = handle.inner_test, 0

        @functools.wraps(inner)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            result = inner(*args, **kwargs)
            count += 1
            return result

        handle.inner_test = counted
        try:
            return (yield)
        finally:
            handle.inner_test = inner
            item.user_properties.append(("examples", count))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if not invariant_ids(item) or (report.when != "call" and report.passed):
            return report
        if call.excinfo is not None:
            reason = _refusal(item, call.excinfo.value)
            if reason is not None:
                report.outcome = "skipped"
                report.longrepr = (str(item.path), item.reportinfo()[1] or 0, f"refused: {reason}")
        outcome = self._outcome(item, report, call)
        report.user_properties.append((_PROPERTY, json.dumps(outcome.to_json())))
        if outcome.reproduce and outcome.reproduce not in report.longreprtext:
            report.sections.append(("reproduce with", outcome.reproduce))
        return report

    def _outcome(self, item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None]) -> Outcome:
        counted = [int(str(value)) for name, value in item.user_properties if name == "examples"]
        status = _status(report)
        if status == "fail" and _not_recorded(call):
            status = "error"
        bad = status in ("fail", "error")
        return Outcome(
            engine=self.config.getoption("--engine"),
            drafter=lane_of(item) or "-",
            invariants=_blamed(item, call) if status == "fail" else invariant_ids(item),
            status=status,
            nodeid=item.nodeid,
            examples=sum(counted) if counted else int(status == "pass"),
            seconds=report.duration,
            message=_message(report, call),
            reproduce=reproduce.command(self.config, item.nodeid) if bad else "",
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.is_worker:
            return
        for name, value in report.user_properties:
            if name == _PROPERTY:
                self.scorecard.add(Outcome.from_json(json.loads(str(value))))
        asked = self.roll.of(report.nodeid) if str(report.when) == DIED else None
        if asked is not None:
            self.scorecard.add(
                Outcome(
                    engine=self.config.getoption("--engine"),
                    drafter=asked[0],
                    invariants=asked[1],
                    status="fail",
                    nodeid=report.nodeid,
                    examples=0,
                    seconds=report.duration,
                    message=str(report.longrepr),
                    reproduce=reproduce.command(self.config, report.nodeid),
                )
            )

    def pytest_keyboard_interrupt(self) -> None:
        self.interrupted = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_worker or self.config.option.collectonly:
            return
        whole = self._complete(session)
        if whole:
            self._expect_every_cell()
        self.scorecard.narrow(self.config.getoption("--invariant"))
        if not self.scorecard.cells:
            return
        from harness.workloads.lanes import LANES

        self.scorecard.order(list(LANES))
        self._note_version()
        self.scorecard.part = self._part(whole)
        # What a command that shows one failure again finds does not replace what a whole run found.
        usual = "scorecard.json" if whole else "scorecard-of-some-tests.json"
        target = self.config.getoption("--scorecard") or self.config.rootpath / "build" / usual
        if self.interrupted:
            self.left_out = f"{target}: not written, since the run was interrupted"
            return
        try:
            self.scorecard.write(target)
        except OSError as error:
            self.left_out = f"{target}: not written: {error.strerror or error}; make room, or name another folder"
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        here = Path.cwd()
        shown = target.relative_to(here) if target.is_relative_to(here) else target
        part = f", a part of a run: {self.scorecard.part}" if self.scorecard.part else ""
        self.written = f"written: {shown}{part}"
        if not self.scorecard.ok and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _part(self, whole: bool) -> str:
        """Which part of a whole run this one is, in the words that asked for it; empty for a whole one."""
        if not whole:
            return "some of its tests"
        options = ("--drafter", "--invariant")
        return " ".join(f"{option} {value}" for option in options for value in self.config.getoption(option))

    def _note_version(self) -> None:
        from harness.engines import version_of

        engine = self.config.getoption("--engine")
        # An engine that is not installed has no version, and its cells tell why.
        with contextlib.suppress(ValueError):
            self.scorecard.versions[engine] = version_of(engine)

    def _complete(self, session: pytest.Session) -> bool:
        """Whether this run was asked for the whole conformance suite, so that an empty cell is a fault."""
        option = self.config.option
        if (
            self.interrupted
            or session.shouldfail
            or session.shouldstop
            or option.keyword
            or option.markexpr
            or option.deselect
        ):
            return False
        if getattr(option, "lf", False) or option.ignore or option.ignore_glob:
            return False
        suite = self.config.rootpath / _SUITE
        roots = [(self.config.invocation_params.dir / arg).resolve() for arg in self.config.args if "::" not in arg]
        return suite.is_dir() and any(suite.is_relative_to(root) for root in roots)

    def _expect_every_cell(self) -> None:
        from harness.workloads.lanes import LANES, catalogue

        engine = self.config.getoption("--engine")
        for name in self.config.getoption("--drafter") or LANES:
            wanted = self.config.getoption("--invariant") or catalogue()
            self.scorecard.expect(engine, name, [i for i in wanted if LANES[name].applies(i)])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.is_worker or not self.scorecard.cells:
            return
        if not self.interrupted:
            from harness.report.table import render

            terminalreporter.section("scorecard")
            terminalreporter.write(render(self.scorecard, colour=terminalreporter.hasmarkup))
            terminalreporter.write_line(self.written)
        if self.left_out:
            terminalreporter.write_line(self.left_out, red=True)


def _not_recorded(call: pytest.CallInfo[None]) -> bool:
    """Whether there was no room for what the engine did: no check has been made, and none has failed."""
    from hypothesis.errors import FlakyFailure

    from harness.record import NotRecorded

    error = None if call.excinfo is None else call.excinfo.value
    parts = error.exceptions if isinstance(error, FlakyFailure) else (error,)
    return any(isinstance(part, NotRecorded) for part in parts)


def _blamed(item: pytest.Item, call: pytest.CallInfo[None]) -> tuple[str, ...]:
    """What was found broken, whether the test asks for it or not: what it asks for beside that is judged by other
    tests. All that it asks for where it failed in another way."""
    from harness.invariants.base import broken

    asked = invariant_ids(item)
    found = () if call.excinfo is None else dict.fromkeys(broken(call.excinfo.value, asked))
    return tuple(found) or asked


def _refusal(item: pytest.Item, error: BaseException) -> str | None:
    """Why the engine declined what the test asked for, or None when it did not decline.

    A property test whose every example was declined ends in `Unsatisfiable`.
    """
    from hypothesis.errors import Unsatisfiable

    from harness.contract import Refused

    if isinstance(error, Refused):
        return str(error)
    lane = getattr(item, "funcargs", {}).get("lane")
    if isinstance(error, Unsatisfiable) and lane is not None and lane.refusals:
        return str(lane.refusals[-1])
    return None


def _status(report: pytest.TestReport) -> Status:
    """A check that was skipped for another reason than a refusal has not been made: an error."""
    if report.passed:
        return "pass"
    if report.skipped:
        return "refused" if _skip_reason(report).startswith("refused: ") else "error"
    return "fail" if report.when == "call" else "error"


def _skip_reason(report: pytest.TestReport) -> str:
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _message(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if report.skipped:
        return _skip_reason(report)
    if call.excinfo is None:
        return ""
    return (str(call.excinfo.value).strip() or call.excinfo.typename)[:4000]
