"""A conformance test that hangs fails at its deadline, and the run goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

AGAIN = 5.0
"""Seconds to the next attempt: where Python ignores exceptions, as in a finalizer, one is lost."""


class Hang(BaseException):
    """The engine under test did not come back in time.

    Not an Exception, so that neither an engine swallows it nor hypothesis tries to shrink a hang.
    """


class Deadline:
    """pytest plugin: raises `Hang` inside a test marked `invariant` after `seconds` of wall time (0: never).

    Uses SIGALRM, so it interrupts Python code in the main thread; a native loop is interrupted when it returns.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
        if not self.seconds or not usable or item.get_closest_marker("invariant") is None:
            return (yield)
        previous = signal.signal(signal.SIGALRM, self._expire)
        signal.setitimer(signal.ITIMER_REAL, self.seconds, AGAIN)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    def _expire(self, _signal: int, _frame: FrameType | None) -> None:
        raise Hang(f"no answer within {self.seconds:g} s: the engine hangs, or give it longer with --deadline")
