"""The pytest sessions of `draftproof run`: each in a process of its own, where pytest imports the plugin itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.report.compare import differences, merged
from harness.report.progress import SHOWN

INTERRUPTED = 130
"""Exit code of what Ctrl-C ended: 128 and the number of the signal."""

PATIENCE = 60.0
"""Seconds that pytest may take to end. Then it is told, too: the signal may have come here alone."""

FILES = ("scorecard.json", "junit.xml")


class Interrupted(Exception):
    """Ctrl-C came. Its words say what is missing."""


def run_one(engine: str, arguments: Sequence[str], out: Path) -> int:
    """Run one engine, with its files in `out` -> pytest's exit code. Raises `Interrupted`."""
    # Of a run that is killed nothing is left, rather than what an earlier one found.
    _remove(out)
    files = ["--scorecard", str(out / FILES[0]), f"--junitxml={out / FILES[1]}"]
    command = [sys.executable, "-m", "pytest", *arguments, *SHOWN, "--engine", engine, *files]
    with subprocess.Popen(command) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # A terminal tells pytest, too, which ends its workers and engines.
            _end(process)
            _remove(out)
            missing = f"{out}: no {' and no '.join(FILES)}, since half a run is no verdict"
            raise Interrupted(f"interrupted. {missing}; the same command begins anew") from None
    return code if code >= 0 else 128 - code


def run_all(engines: Sequence[str], arguments: Sequence[str], out: Path) -> tuple[int, str]:
    """One after another -> (the worst exit code, what differs). Their files go into folders of `out`, the cells of all
    into one scorecard. Raises `Interrupted`."""
    _remove(out)
    codes, cards = [], {}
    for engine in engines:
        folder = out / engine.replace("/", "_").replace(":", "_")
        folder.mkdir(parents=True, exist_ok=True)
        cards[engine] = folder / FILES[0]
        codes.append(run_one(engine, arguments, folder))
    return max(codes), differences(merged(cards, out / FILES[0]), engines)


def _remove(out: Path) -> None:
    for name in FILES:
        (out / name).unlink(missing_ok=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait until it has cleaned up. It is told when it seems not to know; who interrupts again does not wait."""
    try:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
    except KeyboardInterrupt:
        process.kill()
