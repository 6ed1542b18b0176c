"""What this machine is, and which classes of `runners.toml` it satisfies."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ci.runners import RunnerClass

GIB = 2**30
PATIENCE = 30.0
"""Seconds in which nvidia-smi must answer: it hangs on a broken driver."""
QUERY = ("name", "compute_cap", "memory.total", "driver_version")
AMD_DRIVER = Path("/sys/module/amdgpu/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`architecture` as compilers name it: sm_90, gfx942."""

    vendor: str
    name: str
    architecture: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`cuda`: the CUDA or ROCm version that torch was built for. `trouble`: why torch cannot use the GPUs that are
    there. Versions are empty where there is none."""

    system: str
    processor: str
    cpus: int
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    triton: str = ""
    trouble: str = ""


def detect() -> Machine:
    """GPUs as torch sees them, so that hidden devices and slices count for what they are; as the driver lists them
    where torch sees none."""
    listed, driver = _nvidia()
    facts: dict[str, Any] = {"driver": driver, "gpus": listed, "torch": _version("torch"), "triton": _version("triton")}
    try:
        import torch
    except ImportError as error:
        facts["trouble"] = f"torch does not import: {error}" if listed else ""
    else:
        facts["cuda"] = str(torch.version.cuda or torch.version.hip or "")
        if torch.cuda.is_available():
            vendor = "amd" if torch.version.hip else "nvidia"
            facts["gpus"] = tuple(_seen_by_torch(torch, vendor))
            facts["driver"] = _first_line(AMD_DRIVER) if vendor == "amd" else driver
        elif listed:
            facts["trouble"] = _why_unusable(facts["torch"], facts["cuda"], driver)
    return Machine(
        system=platform.system().lower(), processor=platform.machine().lower(), cpus=os.cpu_count() or 1, **facts
    )


def _why_unusable(torch: str, cuda: str, driver: str) -> str:
    if not cuda:
        return f"torch {torch} was built without CUDA; install a build that has it"
    return f"torch {torch} was built for CUDA {cuda} and cannot use driver {driver}: it may be too old, or hidden"


def _seen_by_torch(torch: Any, vendor: str) -> Iterator[Gpu]:
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        architecture = found.gcnArchName.partition(":")[0] if vendor == "amd" else f"sm_{found.major}{found.minor}"
        yield Gpu(vendor=vendor, name=found.name, architecture=architecture, memory_bytes=found.total_memory)


def _nvidia() -> tuple[tuple[Gpu, ...], str]:
    """What nvidia-smi lists, and the driver's version; nothing where there is no driver."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (), ""
    gpus, driver = [], ""
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        name, capability, mebibytes, driver = (field.strip() for field in line.rsplit(",", 3))
        memory = int(mebibytes) * 2**20 if mebibytes.isdigit() else 0
        gpus.append(
            Gpu(vendor="nvidia", name=name, architecture=f"sm_{capability.replace('.', '')}", memory_bytes=memory)
        )
    return tuple(gpus), driver


def _first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def unmet(machine: Machine, wanted: RunnerClass) -> tuple[str, ...]:
    """Why a machine does not satisfy a class, a sentence each; empty when it does. Its first GPU decides."""
    found = []
    if machine.system != "linux":
        found.append(f"the system is {machine.system}, not linux")
    if wanted.has_gpu:
        found += _unmet_by_gpu(machine, wanted)
    return tuple(found)


def _unmet_by_gpu(machine: Machine, wanted: RunnerClass) -> Iterator[str]:
    if not machine.gpus:
        yield f"no {wanted.vendor} GPU is here"
        return
    gpu = machine.gpus[0]
    if machine.trouble:
        yield machine.trouble
    if gpu.vendor != wanted.vendor:
        yield f"{gpu.name} is not of {wanted.vendor}"
        return
    if gpu.architecture not in wanted.architectures:
        yield f"{gpu.name} is {gpu.architecture}, not one of {', '.join(wanted.architectures)}"
    if gpu.memory_bytes < wanted.memory_gib * GIB:
        yield f"{gpu.name} has {gpu.memory_bytes / GIB:.1f} GiB, {wanted.memory_gib:g} are wanted"
    for what, have, bounds in (("driver", machine.driver, wanted.driver), ("CUDA", machine.cuda, wanted.cuda)):
        if bounds and not _within(have, bounds):
            yield f"{what} {have or 'unknown'} is not {bounds}"
    if not machine.triton:
        yield "triton is not installed"


def _within(have: str, bounds: str) -> bool:
    try:
        return SpecifierSet(bounds).contains(Version(have), prereleases=True)
    except InvalidVersion:
        return False


def satisfied(machine: Machine, classes: Mapping[str, RunnerClass]) -> list[RunnerClass]:
    """The classes whose work this machine can do, in the order of the file."""
    return [one for one in classes.values() if not unmet(machine, one)]
