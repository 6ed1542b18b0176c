"""General mutants under the checks: which of them nothing sees."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from harness.mutants.base import ROOT
from harness.mutants.equivalent import EQUIVALENT
from harness.mutants.general import MODULES, REFERENCE, Change, changes
from harness.mutants.runs import Laboratory
from harness.mutants.trial import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Checks that a change must pass; `others`: so many tests of each invariant, None: all."""

    tests: tuple[str, ...]
    lanes: tuple[str, ...] = ()
    others: int | None = None


QUICK_LOOK = Stage(tests=("suites/conformance",), lanes=("EAGLE",), others=1)
WHOLE = (
    Stage(tests=("suites/reference_engine",)),
    Stage(tests=("suites/conformance",), lanes=("EAGLE-tree", "STANDALONE", "MTP")),
)
"""From quick to thorough: only what passes one goes to the next."""

NEAREST: Mapping[str, tuple[str, ...]] = {
    "reference_engine.output": ("finishing", "finish", "logp", "alias", "extract_hidden_states"),
    "reference_engine.row_mean": ("alias", "lifecycle"),
    "reference_engine.scheduler": ("sched", "life", "pages", "delays", "lifecycle"),
    "reference_engine.batch": ("sched", "window", "sampled_requests", "delays"),
    "reference_engine.draft_plan": ("draft_lengths", "draft_length", "edges"),
    "reference_engine.pool": ("state", "sched", "delays", "window"),
    "reference_engine.cache.pages": ("pages", "kv", "lifecycle", "sched"),
    "reference_engine.verification": ("chain_law", "tree_law", "block_law", "shape"),
    "reference_engine.sampling": ("processors", "block_law", "gram", "grammar", "logp", "edges"),
}
"""By the beginning of a module's name: the files of tests that are likeliest to see a change of it."""


QUICK = 40
"""How many of the tests that killed most are looked through for those of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`killer`: the first test that failed, empty when nothing saw the change; `reason`: why nothing can, where that is
    known."""

    family: str
    change: Change
    killer: str
    reason: str = ""


def families() -> tuple[str, ...]:
    return (*MODULES, "kernels")


def changes_of(family: str) -> list[Change]:
    """Every change of a family. Raises ValueError when there is none of that name."""
    if family == "kernels":
        return [change for name in _kernels() for change in changes(f"kernels.{name}", REFERENCE)]
    if family not in MODULES:
        raise ValueError(f"family={family!r}: must be one of {', '.join(families())}")
    return [change for module in MODULES[family] for change in changes(module)]


def _kernels() -> list[str]:
    tests = (ROOT / "suites" / "kernels").glob("test_*.py")
    named = {path.stem.removeprefix("test_") for path in tests}
    return sorted(path.stem for path in (ROOT / "kernels").glob("*.py") if path.stem in named - {"base", "compile"})


def stages_of(family: str, change: Change) -> Sequence[Stage]:
    if family == "kernels":
        own = f"suites/kernels/test_{change.module.rpartition('.')[2]}.py"
        return [Stage(tests=(own,)), Stage(tests=("suites/kernels/test_exact_law.py",))]
    return (QUICK_LOOK, Stage(tests=_nearest(change.module), lanes=("EAGLE",)), *WHOLE)


def _nearest(module: str) -> tuple[str, ...]:
    names = next(names for beginning, names in NEAREST.items() if module.startswith(beginning))
    suites = (ROOT / "suites" / part for part in ("conformance", "reference_engine"))
    files = [suite / f"test_{name}.py" for suite in suites for name in names]
    return tuple(file.relative_to(ROOT).as_posix() for file in files if file.is_file())


def survey(
    laboratory: Laboratory, family: str, *, sample: int | None = None, seed: int = 0, match: str = ""
) -> Iterator[Finding]:
    """Try the changes of a family, or `sample` of them drawn with `seed`, or those whose id holds `match`. Changes that
    are listed as equivalent are not tried."""
    chosen = [change for change in changes_of(family) if match in change.id]
    if sample is not None and sample < len(chosen):
        chosen = random.Random(seed).sample(chosen, sample)
    for change in chosen:
        if change.id in EQUIVALENT:
            yield Finding(family=family, change=change, killer="", reason=EQUIVALENT[change.id])
    alive = {change.id: change for change in chosen if change.id not in EQUIVALENT}
    for number in range(max(len(stages_of(family, change)) for change in chosen) if chosen else 0):
        killers = Counter[str]()
        orders = {name: _order(change, stages_of(family, change)[number], killers) for name, change in alive.items()}
        for trial in laboratory.trials(orders):
            if trial.failed:
                killers[trial.failed] += 1
                yield Finding(family=family, change=alive.pop(trial.mutant), killer=trial.failed)
    for change in alive.values():
        yield Finding(family=family, change=change, killer="")


def _order(change: Change, stage: Stage, killers: Counter[str]) -> Callable[[Path], Order]:
    """What killed others in this stage goes first."""

    def make(folder: Path) -> Order:
        quick = [test for test, _ in killers.most_common(QUICK) if test.startswith(stage.tests)]
        return Order(
            sources={change.module: change.source},
            lanes=stage.lanes,
            tests=(*quick, *stage.tests),
            folder=mkdtemp(dir=folder),
            checkpoints=str(folder / "checkpoints"),
            others=stage.others,
            unmarked=True,
            stop=True,
        )

    return make


def shares(findings: Sequence[Finding]) -> Mapping[str, tuple[int, int, int]]:
    """By operator: killed, survived, equivalent."""
    operators = sorted({finding.change.operator for finding in findings})
    return {name: total([one for one in findings if one.change.operator == name]) for name in operators}


def total(findings: Sequence[Finding]) -> tuple[int, int, int]:
    """Killed, survived, equivalent."""
    killed = sum(bool(finding.killer) for finding in findings)
    equivalent = sum(bool(finding.reason) for finding in findings)
    return killed, len(findings) - killed - equivalent, equivalent
