"""Which suites there are: what each file of `suites/` says in its call of `suite(...)`, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci import runners, stages
from ci.runners import RunnerClass
from ci.stages import Stage

ROOT = Path(__file__).resolve().parents[1]
SUITES = ROOT / "suites"
FIELDS = ("seconds", "stage", "needs")
IMPORT = "from suites.registration import suite"
EXAMPLE = 'suite(seconds=1, stage="cpu", needs="cpu")'


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One call. `path` is relative to the repository, with slashes; `node` is the number of seconds in the file."""

    path: str
    seconds: float
    stage: str
    needs: str
    node: ast.expr = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Registry:
    """What was read, and what is wrong: a line for each fault, naming the file and the mend."""

    registrations: tuple[Registration, ...]
    objections: tuple[str, ...]


class Unreadable(ValueError):
    """A call that says what cannot be taken."""


def read(
    root: Path = ROOT, known: Mapping[str, Stage] | None = None, classes: Mapping[str, RunnerClass] | None = None
) -> Registry:
    """Every test file of `suites/` under `root`."""
    known, classes = known or stages.load(), classes or runners.load()
    found: list[Registration] = []
    wrong: list[str] = []
    for file in sorted((root / "suites").rglob("test_*.py")):
        path = file.relative_to(root).as_posix()
        try:
            mine = list(registered(path, file.read_text(encoding="utf-8")))
        except (Unreadable, SyntaxError) as error:
            wrong.append(f"{path}: {error}")
            continue
        found += mine
        wrong += [f"{path}: {fault}" for fault in _faults(mine, known, classes)]
    return Registry(tuple(found), tuple(wrong))


def must_read(root: Path = ROOT) -> tuple[Registration, ...]:
    """The registrations. Raises ValueError with every objection."""
    registry = read(root)
    if registry.objections:
        raise ValueError(complaint(registry.objections))
    return registry.registrations


def complaint(objections: Iterable[str]) -> str:
    return "\n".join(["suites that are not registered as they must be:", *objections])


def registered(path: str, source: str) -> Iterator[Registration]:
    """The calls at the top level of a file. Raises Unreadable where an argument is missing, unknown or not literal."""
    for statement in ast.parse(source, filename=path).body:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id="suite")) as call):
                yield _registration(path, call)


def _registration(path: str, call: ast.Call) -> Registration:
    unknown = any(keyword.arg not in FIELDS for keyword in call.keywords)
    if call.args or unknown:
        raise Unreadable(
            f"line {call.lineno}: suite(...) takes {', '.join(FIELDS)} by name and nothing else: {EXAMPLE}"
        )
    nodes = {str(keyword.arg): keyword.value for keyword in call.keywords}
    missing = [name for name in FIELDS if name not in nodes]
    if missing:
        raise Unreadable(f"line {call.lineno}: suite(...) lacks {', '.join(missing)}: {EXAMPLE}")
    values = {name: _literal(name, node, float if name == "seconds" else str) for name, node in nodes.items()}
    return Registration(path=path, node=nodes["seconds"], **values)


def _literal(name: str, node: ast.expr, kind: type[float] | type[str]) -> Any:
    value = node.value if isinstance(node, ast.Constant) else None
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    if kind is str and isinstance(value, str):
        return value
    what = "a positive number" if kind is float else "a string in quotes"
    raise Unreadable(f"line {node.lineno}: {name}={ast.unparse(node)}: write {what} there, it is read and not run")


def _faults(mine: list[Registration], known: Mapping[str, Stage], classes: Mapping[str, RunnerClass]) -> Iterator[str]:
    """What is wrong with the registrations of one file."""
    if not mine:
        yield f"is not registered; add after its imports `{IMPORT}` and the line `{EXAMPLE}`"
    run = [stage.name for stage in known.values() if stage.runs and not stage.suites_of]
    for at, one in enumerate(mine):
        if one.stage in (earlier.stage for earlier in mine[:at]):
            yield f"is registered twice for stage {one.stage!r}; take one of the two lines away"
        if one.needs not in classes:
            yield f"needs={one.needs!r}: ci/runners.toml has no such class; choose from {', '.join(classes)}"
        if one.stage not in known:
            yield f"stage={one.stage!r}: ci/stages.toml has no such stage; choose from {', '.join(run)}"
        elif one.stage not in run:
            yield f"stage={one.stage!r}: no workflow runs it; choose from {', '.join(run)}"
        elif one.needs in classes and not classes[one.needs].hosted and not known[one.stage].own_machines:
            guarded = ", ".join(stage.name for stage in known.values() if stage.own_machines)
            yield f"needs={one.needs!r}: stage {one.stage!r} runs on hosted machines only; take stage {guarded}"
