"""Every file of this folder is registered, and a job of CI runs its part of them: `--stage cpu --shard 2/3`."""

from __future__ import annotations

import pytest

from ci import registry, shards, stages
from suites.perf import refuse_workers


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("draftproof")
    group.addoption("--stage", default="", metavar="NAME", help="only the suites of this stage of ci/stages.toml")
    group.addoption("--needs", default="cpu", metavar="CLASS", help="of those, the suites for these machines")
    group.addoption("--shard", default="", metavar="K/N", help="of those, part K of N: the plan of draftproof ci plan")


def pytest_configure(config: pytest.Config) -> None:
    refuse_workers(config)
    stage, shard = config.getoption("--stage"), config.getoption("--shard")
    if shard and not stage:
        raise pytest.UsageError(f"--shard {shard}: goes with --stage; choose from {', '.join(stages.load())}")
    if stage:
        try:
            wanted = shards.shard(registry.must_read(), stages.load(), stage, config.getoption("--needs"), shard)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
        every = sorted(registry.SUITES.rglob("test_*.py"))
        left_out = [str(path) for path in every if path.relative_to(registry.ROOT).as_posix() not in wanted]
        config.option.ignore = [*(config.option.ignore or ()), *left_out]


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        objections = registry.read().objections
        if objections:
            raise pytest.UsageError(registry.complaint(objections))
