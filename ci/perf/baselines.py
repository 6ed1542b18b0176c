"""What was accepted: `ci/baselines/CLASS.json`, one file for each baseline key of `ci/runners.toml`."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from ci import doctor, runners
from ci.perf import trees

FOLDER = Path(__file__).resolve().parents[1] / "baselines"
CPUINFO = Path("/proc/cpuinfo")


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where figures come from. `uncommitted`: files that differed from the commit."""

    machine: str
    cpus: int
    gpu: str = ""
    python: str
    torch: str
    uncommitted: tuple[str, ...] = ()


class Baseline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`counted`: figures by name. `timed`: time of each benchmark as a ratio to the control's, for trends; a new source
    is held against the one that `sources` names (git's hash of each measured folder), which is timed again."""

    runner_class: str
    commit: str
    date: str
    provenance: Provenance
    sources: dict[str, str]
    counted: dict[str, float]
    timed: dict[str, float]


def here() -> str:
    """The baseline key of this machine: that of the last class in `ci/runners.toml` which it satisfies."""
    found = doctor.satisfied(doctor.detect(), runners.load())
    if not found:
        raise ValueError("this machine satisfies no class of ci/runners.toml; `draftproof ci doctor` says why")
    return found[-1].baseline


def path_of(runner_class: str) -> Path:
    return FOLDER / f"{runner_class}.json"


def read(path: Path) -> Baseline:
    """Raises ValueError naming the file, and the field that does not fit."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no baseline for this class; `draftproof perf accept` writes it")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Baseline)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}; `draftproof perf accept` writes it anew") from error


def write(baseline: Baseline, path: Path) -> None:
    """Sorted and a figure a line, so that a difference of two files can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    compact = msgspec.json.encode(baseline, order="sorted")
    path.write_bytes(msgspec.json.format(compact, indent=1) + b"\n")


def made_here(
    runner_class: str, counted: dict[str, float], timed: dict[str, float], root: Path = trees.ROOT
) -> Baseline:
    """With the provenance of this machine, now."""
    machine = doctor.detect()
    return Baseline(
        runner_class=runner_class,
        commit=trees.git("rev-parse", "HEAD", root=root),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        provenance=Provenance(
            machine=_processor(),
            cpus=os.cpu_count() or 1,
            gpu=machine.gpus[0].name if machine.gpus else "",
            python=platform.python_version(),
            torch=version("torch"),
            uncommitted=tuple(trees.uncommitted(root)),
        ),
        sources=trees.hashes(root=root),
        counted=counted,
        timed=timed,
    )


def _processor() -> str:
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
