"""Compiles every kernel for GPUs that are not here, and reads what the binaries say about registers and spills.

`compile_all` runs a few worker processes without the interpreter; `python -m kernels.compile` is such a worker. What a
compilation says is kept in the cache folder under a hash of the sources, so that a second run takes no time.
Registers and spills of NVIDIA targets come from the cubin, by the cuobjdump that ships with Triton; of AMD targets
from the emitted assembly.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels import KERNELS
from kernels.base import Variant

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx90a")
CACHE = Path(__file__).resolve().parents[1] / "build" / "kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One variant for one target. `spills` are bytes of stack a thread (NVIDIA) or registers (AMD), `shared` is bytes a
    program; None = the tools do not say. `error` is the compiler's last line when there is no binary."""

    kernel: str
    variant: int
    target: str
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    seconds: float = 0.0
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.kernel}[{self.variant}] for {self.target}"


Job = tuple[str, int, str]
"""Kernel, index of the variant, target."""


def jobs(names: Iterable[str], targets: Sequence[str], variants: int | None = None) -> list[Job]:
    """Every variant, or the first `variants` of each kernel, for every target."""
    return [
        (name, i, target) for name in names for i in range(len(KERNELS[name].variants[:variants])) for target in targets
    ]


def compile_all(
    names: Sequence[str] | None = None,
    targets: Sequence[str] = TARGETS,
    *,
    variants: int | None = None,
    processes: int = 2,
    cache: Path = CACHE,
    timeout: float = 600.0,
) -> list[Compiled]:
    """Compile the kernels `names` (None = all) for `targets`, each in its first `variants` (None = all).

    Raises ValueError for an unknown target, RuntimeError when a worker ends without its results; a variant that does
    not compile is a result with an `error`."""
    for target in targets:
        if target not in TARGETS:
            raise ValueError(f"target={target!r}: must be one of {', '.join(TARGETS)}")
    cache.mkdir(parents=True, exist_ok=True)
    files = {job: _kept(cache, *job) for job in jobs(KERNELS if names is None else names, targets, variants)}
    results = [_parsed(file.read_text()) for file in files.values() if file.exists()]
    work = [job for job, file in files.items() if not file.exists()]
    # Dealt out in turn: the variants of a kernel take alike, so no worker gets all the long ones.
    workers = [_start(work[i::processes], cache) for i in range(min(processes, len(work)))]
    results += [result for worker in workers for result in _collect(worker, timeout)]
    return sorted(results, key=lambda result: (result.kernel, result.variant, result.target))


def objections(results: Iterable[Compiled]) -> list[str]:
    """What is wrong with them: no binary, or more spills than the kernel accounts for."""
    found = []
    for result in results:
        if result.error is not None:
            found.append(f"{result}: {result.error}")
        elif (result.spills or 0) > (limit := KERNELS[result.kernel].spill_limit):
            figures = f"{result.registers} registers and {result.spills} spilled"
            found.append(f"{result}: {figures}, at most {limit} accounted for; mend it or say why")
    return found


def _start(share: Sequence[Job], cache: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache / "triton")
    # The default changes between Triton versions; the numbers should not.
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "kernels.compile", str(cache), json.dumps(share)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _collect(worker: subprocess.Popen[str], timeout: float) -> list[Compiled]:
    try:
        out, err = worker.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.communicate()
        raise RuntimeError(f"compilation took longer than {timeout:.0f} s") from None
    if worker.returncode != 0:
        raise RuntimeError(f"a compile worker ended with {worker.returncode}: {err.strip()[-2000:]}")
    return [_parsed(line) for line in out.splitlines()]


def _parsed(line: str) -> Compiled:
    return Compiled(**json.loads(line))


def _worker(share: Sequence[Job], cache: Path) -> None:
    for name, index, target in share:
        result = _compile(name, index, target)
        line = json.dumps(asdict(result))
        if result.error is None:
            kept = _kept(cache, name, index, target)
            # Others may compile the same, and read this: never half a file.
            part = kept.with_suffix(f".{os.getpid()}")
            part.write_text(line)
            part.replace(kept)
        sys.stdout.write(line + "\n")


def _kept(cache: Path, name: str, index: int, target: str) -> Path:
    return cache / f"{name}-{index}-{target}-{_sources(name)}.json"


def compiled_targets(name: str, cache: Path = CACHE) -> list[str]:
    """Targets for which every variant of the kernel, as it stands, has been compiled."""
    variants = range(len(KERNELS[name].variants))
    return [target for target in TARGETS if all(_kept(cache, name, i, target).exists() for i in variants)]


@functools.cache
def _sources(name: str) -> str:
    """A hash of everything that a kernel's binaries depend on: its file, those that are not of another kernel, and
    Triton's version."""
    import triton

    digest = hashlib.sha256(triton.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem == name or path.stem not in KERNELS:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(name: str, index: int, target: str) -> Compiled:
    started = time.perf_counter()
    try:
        binary = _binary(KERNELS[name].variants[index], target)
        figures = _nvidia(binary.asm["cubin"]) if target.startswith("sm_") else _amd(binary.asm["amdgcn"])
        figures.setdefault("shared", int(binary.metadata.shared))
    except Exception as error:  # whatever stops a compiler is the result here
        lines = str(error).strip().splitlines() or [repr(error)]
        return Compiled(kernel=name, variant=index, target=target, error=f"{type(error).__name__}: {lines[-1]}")
    return Compiled(
        kernel=name, variant=index, target=target, seconds=round(time.perf_counter() - started, 3), **figures
    )


def _binary(variant: Variant, target: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(variant.signature)
    source = ASTSource(
        fn=variant.function,
        signature=dict(variant.signature),
        constexprs=dict(variant.constexprs),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible},
    )
    gpu = GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(source, target=gpu, options=options)


def _nvidia(cubin: bytes) -> dict[str, Any]:
    """From the binary itself. These kernels have no arrays of their own: what is on the stack was spilled to it."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", report)
    return {"registers": int(used[1]), "spills": int(used[2])} if used else {}


def _amd(assembly: str) -> dict[str, Any]:
    """From the metadata at the end of the assembly. Scalar registers spill into lanes of vector registers, not into
    memory, so only vector registers count."""

    def figure(name: str) -> int | None:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found[1]) if found else None

    return {"registers": figure("vgpr_count"), "spills": figure("vgpr_spill_count")}


if __name__ == "__main__":
    _worker(json.loads(sys.argv[2]), Path(sys.argv[1]))
