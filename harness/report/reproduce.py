"""The command that runs one failing test again, alone, with the same examples."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

USUAL = {"--engine": "reference", "--tier": "fast", "--seeds": 1, "--kernels": "auto", "--examples": None}
"""Options that decide what a test does, and what they are when they are not given."""


def command(config: pytest.Config, nodeid: str) -> str:
    """A shell line, to be run from the repository root, or from anywhere when the run was started elsewhere.

    The seed alone decides the examples of a property test, unless --examples names a database: failing examples of that
    one are tried first.
    """
    root = config.rootpath
    if Path.cwd() == root:
        words = [_pytest(root), shlex.quote(nodeid)]
    else:
        words = [str(Path(sys.executable).parent / "pytest"), shlex.quote(f"{root}/{nodeid}"), f"--rootdir={root}"]
    for option, usual in USUAL.items():
        value = config.getoption(option)
        if value != usual:
            words += [option, shlex.quote(str(value))]
    words.append(f"--hypothesis-seed={config.getoption('hypothesis_seed')}")
    return " ".join((["CI=1"] if os.environ.get("CI") else []) + words)


def current_command(config: pytest.Config) -> str | None:
    """The command for the test that is running, or None between tests."""
    running = os.environ.get("PYTEST_CURRENT_TEST")
    return command(config, running.rpartition(" (")[0]) if running else None


def _pytest(root: Path) -> str:
    """The pytest of this environment, relative to the repository where it lies inside."""
    program = Path(sys.executable).parent / "pytest"
    return str(program.relative_to(root) if program.is_relative_to(root) else program)
