"""Tables of the Triton kernels: where they run here, what is tested of them, and what their binaries need."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence

import torch
from rich.table import Table

from kernels import KERNELS
from kernels.base import choose_backend, interpreted


def require_triton() -> None:
    """Raises ValueError where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError("kernels need Triton, which is not installed (it is built for Linux only): pip install triton")


def chosen(names: Sequence[str]) -> list[str]:
    """The kernels of these names; all of them where none is given. Raises ValueError for a name that there is not."""
    for name in names:
        if name not in KERNELS:
            raise ValueError(f"--kernel {name}: there is none of that name; choose from {', '.join(KERNELS)}")
    return list(names or KERNELS)


def runs_here() -> str:
    """What an engine gets on this machine that leaves the choice to us."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if choose_backend("auto", device) == "torch":
        return "torch"
    return "interpreted triton" if interpreted() else "compiled triton"


def catalogue(names: Iterable[str]) -> Table:
    """One row a kernel. Targets are those that it was compiled for, as its files stand."""
    from kernels.compile import compiled_targets

    table = Table("name", "arguments", "runs here", "properties tested", "compiled for", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    here = runs_here()
    for name in names:
        kernel = KERNELS[name]
        targets = ", ".join(compiled_targets(name)) or "nothing yet (--compile)"
        # Square brackets would be read as styles.
        table.add_row(name, kernel.shapes.replace("[", r"\["), here, ", ".join(kernel.properties), targets)
    return table


def compiled(names: Sequence[str], processes: int) -> tuple[Table, list[str]]:
    """Compile for every target: registers, spills and shared memory of each binary, and what is wrong with them."""
    from kernels.compile import TARGETS, compile_all, objections

    table = Table("name", "variant", *TARGETS, box=None, pad_edge=False)
    results = compile_all(names, processes=processes)
    cells = {(result.kernel, result.variant, result.target): result for result in results}
    for name in names:
        for index, variant in enumerate(KERNELS[name].variants):
            row = [cells[name, index, target] for target in TARGETS]
            figures = ["failed" if one.error else f"{one.registers} / {one.spills} / {one.shared}" for one in row]
            constants = ", ".join(f"{key}={value}" for key, value in variant.constexprs.items())
            table.add_row(name, constants or "-", *figures)
    return table, objections(results)
