"""The shape of the repository: arrows run one way, files stay small, and nothing in the catalogue goes unchecked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from harness.workloads.lanes import LANES, catalogue
from suites.registration import suite

suite(seconds=4.1, stage="cpu", needs="cpu")

ROOT = Path(__file__).resolve().parents[2]
OURS = ("harness", "reference_engine", "kernels", "suites", "ci")
PACKAGES = [name for name in OURS if (ROOT / name).is_dir()]
MAX_LINES = 450

MAY_IMPORT = {
    "kernels": {"kernels"},
    "reference_engine": {"reference_engine", "kernels"},
    "harness/contract": {"harness.contract"},
    "harness/invariants": {"harness.contract", "harness.invariants"},
    "harness/oracles": {"harness.contract", "harness.oracles"},
    "harness/known_answer": {"harness.contract", "harness.known_answer"},
    "harness/record": {"harness.contract", "harness.record"},
    "harness/workloads": {"harness"},
    "harness/report/kernels.py": {"harness", "kernels"},
    "harness/report": {"harness"},
    "harness/engines/reference.py": {"harness", "reference_engine"},
    "harness/mutants": {"harness", "reference_engine", "kernels"},
    "harness/cli.py": {"harness", "ci"},
    "harness": {"harness"},
    "ci": {"ci", "harness", "reference_engine", "kernels"},
}
"""What of ours a part may import; the most particular entry decides. Suites may import anything."""


def sources(*parts: str) -> list[Path]:
    return sorted(path for part in parts for path in (ROOT / part).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function."""
    package = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = (
                ".".join((*package[: -node.level], *filter(None, [node.module]))) if node.level else str(node.module)
            )
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def allowed(path: Path) -> set[str]:
    place = path.relative_to(ROOT).as_posix()
    rules = [part for part in MAY_IMPORT if place == part or place.startswith(f"{part}/")]
    return MAY_IMPORT[max(rules, key=len)]


def inside(module: str, packages: set[str] | tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def forbidden_imports(path: Path) -> set[str]:
    permitted = allowed(path)
    heads = {f"harness.{name}" for name in ("contract", "invariants", "oracles")} & permitted
    return {
        module
        for module in imported(path)
        if inside(module, OURS) and not inside(module, permitted) and not (module == "harness" and heads)
    }


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "suites"])
def test_arrows_run_one_way(package: str) -> None:
    wrong = {str(path.relative_to(ROOT)): forbidden_imports(path) for path in sources(package)}
    assert {path: modules for path, modules in wrong.items() if modules} == {}


def test_a_wrong_arrow_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for place, line in (
        ("harness/invariants/count.py", "from harness.oracles import finish"),
        ("harness/contract/trace.py", "from harness import plugin"),
        ("reference_engine/engine.py", "def late():\n    import harness.contract"),
        ("harness/cli.py", "from reference_engine import LLMEngine"),
        ("harness/plugin.py", "from ci import registry"),
        ("ci/registry.py", "from suites import registration"),
    ):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line, encoding="utf-8")
        assert forbidden_imports(path), place


@pytest.mark.parametrize("package", PACKAGES)
def test_files_are_short_enough_to_read_in_one_go(package: str) -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(package)}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "suites"])
def test_nothing_unpickles(package: str) -> None:
    """Checkpoints are safetensors: a pickle runs code when it is read."""
    for path in sources(package):
        wrong = [module for module in imported(path) if inside(module, ("pickle", "dill", "joblib"))]
        wrong += [name for name in ("torch.load", "torch.save") if name in calls(path)]
        assert not wrong, f"{path.relative_to(ROOT)} uses {wrong}"


def calls(path: Path) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)}


def marked_invariants() -> dict[str, set[str]]:
    """Catalogue ids in `invariant` markers, with the names of the files that hold them."""
    found: dict[str, set[str]] = {}
    for path in sources("suites/conformance"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.invariant":
                for argument in node.args:
                    assert isinstance(argument, ast.Constant), f"{path.name}: give invariant ids as plain strings"
                    found.setdefault(str(argument.value), set()).add(path.name)
    return found


def test_every_invariant_has_a_conformance_test() -> None:
    assert sorted(marked_invariants()) == catalogue()


def test_every_invariant_has_a_column_that_it_applies_to() -> None:
    for name in catalogue():
        assert [lane for lane, spec in LANES.items() if spec.applies(name)], name
