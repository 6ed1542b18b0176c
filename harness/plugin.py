"""pytest plugin: `--engine`, `--drafter`, the `lane` fixture, hypothesis profiles and the scorecard.

Loaded through the `pytest11` entry point, so it must stay cheap to import: torch and the harness proper are imported
only when a conformance test is collected.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.report import reproduce
from harness.report.collector import ScorecardCollector
from harness.report.deadline import Deadline
from harness.report.marks import NO_LANE, invariant_ids, lane_of
from harness.report.rotation import asked_for_by_name, is_property, out_of_turn

if TYPE_CHECKING:
    from harness.report.workers import LaneScheduling
    from harness.workloads.lane import Keep, Lane
    from harness.workloads.runs import RunCache

EXAMPLES = {"fast": 3, "full": 60}
"""hypothesis examples per property test, by tier."""

DEADLINES = {"fast": 60.0, "full": 1800.0}
"""Seconds in which a conformance test must be done, by tier."""

SLOWER = 5
"""How many times as long an engine in a process of its own may take."""

SHARED = "shared"
"""The hypothesis profile of runs that share their failing examples."""

JUDGES_REFUSALS = {"CONF-1"}
"""Its tests judge whether an engine may decline a drafter. CONF-2 is not among them: where the drafter is declined
anyway, declining a broken checkpoint shows nothing."""

ACCEPTANCE = frozenset({"ACCEPT-1", "ACCEPT-2"})

MARKERS = (
    "invariant(id, ...): the catalogue ids that the test checks; its result goes into those cells of the scorecard",
    "drafters(name, ...): run on these drafter lanes only",
    "real_model: needs a real checkpoint (make real-model)",
    "perf: a benchmark (make bench)",
    "browser: looks at the report in Chromium (make browser)",
    "full: runs with --tier full only",
    "composite: judges by every invariant, so that its failure says little about the one that it is marked with",
    "kernels: properties of the Triton kernels (make kernels)",
    "gpu: needs a CUDA device",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("draftproof")
    group.addoption("--engine", default="reference", metavar="NAME", help="engine under test (default: reference)")
    group.addoption("--drafter", action="append", default=[], metavar="LANE", help="only this drafter lane; repeatable")
    group.addoption("--invariant", action="append", default=[], metavar="ID", help="only this invariant; repeatable")
    group.addoption(
        "--tier", choices=sorted(EXAMPLES), default="fast", help="full: more examples of each property, and long sweeps"
    )
    group.addoption(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="run each scenario with N seeds, and each property on N times the examples",
    )
    group.addoption(
        "--kernels",
        choices=("auto", "torch", "triton"),
        default="auto",
        help="what computes the reference engine's steps (default: Triton on CUDA, torch on a CPU)",
    )
    group.addoption("--scorecard", type=Path, default=None, metavar="PATH", help="default: build/scorecard.json")
    group.addoption(
        "--checkpoints", type=Path, default=None, metavar="DIR", help="keep the known-answer checkpoints there"
    )
    group.addoption(
        "--examples", metavar="WHERE", help="share failing examples there with other runs: a folder, or redis://HOST"
    )
    group.addoption("--record", type=Path, default=None, metavar="DIR", help="write every run there: docs/trace.md")
    group.addoption("--no-shrink", action="store_true", help="report the first failing example as it was found")
    group.addoption(
        "--deadline",
        type=float,
        default=None,
        metavar="SECONDS",
        help="fail tests that hang; 0: wait (default: 60, full tier 1800; 5 times that for an engine elsewhere)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Before workers start: one thread each, and a seed that can be printed.

    The checkpoints are so small that a second torch thread costs twenty times what it saves.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.getoption("--kernels") == "triton":
        import torch

        # Triton looks at it when it is imported, in this process and in the workers.
        os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
    if config.getoption("hypothesis_seed", default="absent") is None:
        config.option.hypothesis_seed = "0" if os.environ.get("CI") else str(random.SystemRandom().getrandbits(32))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if config.getoption("--seeds") < 1:
        raise pytest.UsageError(f"--seeds {config.getoption('--seeds')}: must be at least 1")
    examples = EXAMPLES[config.getoption("--tier")] * config.getoption("--seeds")
    shrink = not config.getoption("--no-shrink") and not _isolated(config)
    _load_hypothesis_profile(examples, shrink=shrink, shared=config.getoption("--examples"))
    # pytest-benchmark makes its folder as it starts, wherever that is, also where nothing is measured.
    if getattr(config.option, "benchmark_storage", "") == "file://./.benchmarks":
        config.option.benchmark_storage = f"file://{config.rootpath / 'build' / 'benchmarks'}"
    _refuse_unknown_names(config)
    _refuse_folders_that_take_nothing(config)
    config.pluginmanager.register(ScorecardCollector(config), "draftproof-scorecard")
    deadline = config.getoption("--deadline")
    if deadline is None:
        times = SLOWER if _isolated(config) else 1
        deadline = times * DEADLINES[config.getoption("--tier")]
    config.pluginmanager.register(Deadline(deadline), "draftproof-deadline")


def _isolated(config: pytest.Config) -> bool:
    """Whether the engine runs in a process of its own: `harness.report.reproducers` makes its failures smaller."""
    engine = config.getoption("--engine")
    if engine == "reference":
        return False
    from harness.engines import is_isolated

    return is_isolated(engine)


def _slow(config: pytest.Config) -> bool:
    """Whether each set-up of the engine takes seconds to start."""
    engine = config.getoption("--engine")
    if engine == "reference":
        return False
    from harness.engines import is_slow

    return is_slow(engine)


def _showing(config: pytest.Config) -> set[str]:
    """Tests that show what is known to be wrong with the engine."""
    from harness.report.findings import known_of, read

    return {test for finding in known_of(read(), str(config.getoption("--engine"))) for test in finding.shown_by}


def _load_hypothesis_profile(max_examples: int, *, shrink: bool, shared: str | None) -> None:
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.internal.conjecture import providers

    # Constants of whatever modules happen to be loaded would go into the examples, so that a seed would mean one thing
    # in a whole run and another when a test runs alone.
    assert hasattr(providers, "is_local_module_file"), "hypothesis has moved what finds constants of local modules"
    providers.is_local_module_file = lambda _path: False

    slow_engine = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
    # The explain phase runs the engine hundreds of times more to say little.
    left_out = {Phase.explain} if shrink else {Phase.explain, Phase.shrink}
    phases = [phase for phase in Phase if phase not in left_out]
    common = settings(
        max_examples=max_examples,
        deadline=None,
        print_blob=True,
        phases=phases,
        suppress_health_check=slow_engine,
    )
    settings.register_profile("local", common)
    settings.register_profile("ci", common, derandomize=True, database=None)
    if shared is not None:
        _share_examples(shared, common)
    else:
        settings.load_profile("ci" if os.environ.get("CI") else "local")


def _share_examples(where: str, common: Any) -> None:
    from hypothesis import settings

    from harness.report.examples import database

    try:
        settings.register_profile(SHARED, common, database=database(where))
    except ValueError as error:
        raise pytest.UsageError(f"--examples: {error}") from error
    settings.load_profile(SHARED)


def _refuse_unknown_names(config: pytest.Config) -> None:
    """Raises UsageError for an engine, lane or invariant that there is not."""
    engine, drafters, invariants = (config.getoption(name) for name in ("--engine", "--drafter", "--invariant"))
    if engine == "reference" and not drafters and not invariants:
        return
    from harness.workloads.lanes import LANES, catalogue, factory_of

    for option, names, known in (("--drafter", drafters, LANES), ("--invariant", invariants, catalogue())):
        for name in names:
            if name not in known:
                raise pytest.UsageError(f"{option} {name}: there is none of that name; choose from {', '.join(known)}")
    if invariants and not any(LANES[lane].applies(name) for lane in drafters or LANES for name in invariants):
        raise pytest.UsageError(f"--invariant {', '.join(invariants)}: says nothing about {', '.join(drafters)}")
    try:
        factory_of(engine)
    except ValueError as error:
        raise pytest.UsageError(f"--engine: {error}") from error


def _refuse_folders_that_take_nothing(config: pytest.Config) -> None:
    """Raises UsageError: tests that cannot write their runs would look as if the engine had failed."""
    from harness.report.places import require_folder

    scorecard, record = config.getoption("--scorecard"), config.getoption("--record")
    try:
        for option, folder in (("--scorecard", scorecard and scorecard.parent), ("--record", record)):
            if folder is not None:
                require_folder(option, folder)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per drafter lane to which all of its invariants apply."""
    if "lane" not in metafunc.fixturenames:
        return
    from harness.workloads.lanes import LANES

    only = metafunc.definition.get_closest_marker("drafters")
    chosen = metafunc.config.getoption("--drafter") or list(LANES)
    ids = invariant_ids(metafunc.definition)
    names = [
        name
        for name in chosen
        if (only is None or name in only.args) and all(LANES[name].applies(invariant) for invariant in ids)
    ]
    metafunc.parametrize("lane", names or [NO_LANE], indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what was asked for, and let property tests of one strategy see the same examples.

    With one seed for all of them a lane can answer equal requests from its cache of runs.
    """
    wanted = set(config.getoption("--invariant"))
    fast = config.getoption("--tier") == "fast"
    dropped = {
        item
        for item in items
        if (wanted and not wanted & set(invariant_ids(item)))
        or lane_of(item) == NO_LANE
        or not _is_for_its_lane(item)
        or (fast and item.get_closest_marker("full"))
    }
    if fast and not asked_for_by_name(config, config.rootpath / "suites" / "conformance", slow=_slow(config)):
        from harness.workloads.lanes import LANES, taken

        lanes = taken(config.getoption("--engine")) if _isolated(config) else list(LANES)
        dropped |= out_of_turn((item for item in items if item not in dropped), lanes, _showing(config))
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
    shared = config.getoption("--examples") is not None
    if shared:
        from hypothesis import core

        # With a seed for the whole session hypothesis looks into no database; each test is given its own below.
        core.global_force_seed = None
    for item in items:
        if shared or invariant_ids(item):
            _seed_property_test(item, config.getoption("hypothesis_seed"), shared=shared)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LaneScheduling | None:
    from harness.report.workers import lane_scheduling
    from harness.workloads.lanes import LANES

    return lane_scheduling(config, log, config.getoption("--drafter") or list(LANES))


def _is_for_its_lane(item: pytest.Item) -> bool:
    """Single parameters may be marked with `drafters`, too."""
    lane = lane_of(item)
    return lane is None or all(lane in marker.args for marker in item.iter_markers("drafters"))


def _seed_property_test(item: pytest.Item, session_seed: str, *, shared: bool) -> None:
    from hypothesis import seed, settings

    if not is_property(item):
        return
    test = seed(int(session_seed))(item.function)
    if shared:
        # A seed takes the database away.
        own = test._hypothesis_internal_use_settings
        test._hypothesis_internal_use_settings = settings(own, database=settings.get_profile(SHARED).database)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Ask once whether the engine takes the drafter at all, and tells what the test judges, instead of in every example
    of every property."""
    lane = getattr(item, "funcargs", {}).get("lane")
    if lane is not None and not JUDGES_REFUSALS & set(invariant_ids(item)):
        lane.knock()
        if invariant_ids(item) and ACCEPTANCE.issuperset(invariant_ids(item)):
            lane.tells_acceptance()


@pytest.fixture(scope="session")
def runs() -> RunCache:
    """What all lanes of this process have run."""
    from harness.workloads.runs import RunCache

    return RunCache()


@pytest.fixture(scope="session")
def keep(pytestconfig: pytest.Config) -> Keep:
    from harness.report.reproducers import Keeper

    scorecard = pytestconfig.getoption("--scorecard") or pytestconfig.rootpath / "build" / "scorecard.json"
    return Keeper(scorecard.parent / "reproducers")


@pytest.fixture(scope="session")
def lane(request: pytest.FixtureRequest, runs: RunCache, keep: Keep, tmp_path_factory: pytest.TempPathFactory) -> Lane:
    """An engine with one drafter, the known-answer checkpoints that it loads, and their oracles."""
    from harness.workloads.lane import Lane
    from harness.workloads.lanes import LANES

    root = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        root = root.parent
    config = request.config
    return Lane(
        config.getoption("--engine"),
        LANES[request.param],
        config.getoption("--checkpoints") or root / "known-answer",
        runs,
        config.getoption("--seeds"),
        lambda: reproduce.current_command(config),
        config.getoption("--kernels"),
        config.getoption("--record"),
        keep,
    )


@pytest.fixture(scope="session")
def tier(request: pytest.FixtureRequest) -> str:
    """fast or full: how much of a long sweep to run."""
    return str(request.config.getoption("--tier"))


@pytest.fixture
def record_examples(request: pytest.FixtureRequest) -> Callable[[int], None]:
    """`record_examples(n)`: tell the scorecard that a sweep checked n points."""
    return lambda count: request.node.user_properties.append(("examples", count))
