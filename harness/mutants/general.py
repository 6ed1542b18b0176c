"""Mutants without imagination: every place where an operator of a small set applies, one change each.

They measure the checks where nobody thought of a bug. `MODULES` says which parts of the engine are mutated.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from harness.mutants.base import source_of

MODULES: Mapping[str, tuple[str, ...]] = {
    "verification": (
        "reference_engine.verification.base",
        "reference_engine.verification.chain",
        "reference_engine.verification.tree",
        "reference_engine.sampling.sampler",
        "reference_engine.sampling.processors",
        "reference_engine.sampling.bad_words",
        "reference_engine.sampling.logprobs",
    ),
    "output": ("reference_engine.output", "reference_engine.row_mean"),
    "scheduling": (
        "reference_engine.scheduler",
        "reference_engine.batch",
        "reference_engine.draft_plan",
        "reference_engine.pool",
        "reference_engine.cache.pages",
    ),
}
"""Families of modules; the references of kernels are a further one, "kernels"."""

REFERENCE = "reference"
"""Of a kernel only the function of this name: the rest is Triton and its launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One place and what becomes of it. `module`:`line` and `function` say where, `operator` is a key of `OPERATORS`,
    `number` counts equal changes of one function; `source` is the whole module with the change in it."""

    module: str
    line: int
    function: str
    operator: str
    before: str
    after: str
    source: str
    number: int = 1

    @property
    def id(self) -> str:
        """Tells it from every other, and stays when lines move."""
        place = f"{self.module}:{self.function}" + (f"#{self.number}" if self.number > 1 else "")
        return f"{place}: {' '.join(self.before.split())} -> {self.after}"


SWAPPED: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COPIES = ("clone", "contiguous", "copy")
GUARDS = ("clamp", "masked_fill")


def _comparison(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [SWAPPED[type(node.ops[0])]()], node.comparators)  # type: ignore[list-item]


def _logic(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BoolOp):
        yield ast.BoolOp(SWAPPED[type(node.op)](), node.values)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield node.operand
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        yield ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)  # type: ignore[arg-type]
    if isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)


def _off_by_one(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield node.left if _is_int(node.right) else ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)  # type: ignore[arg-type]
    elif _is_int(node):
        yield ast.Constant(node.value + 1)  # type: ignore[attr-defined]


def _dropped_copy(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COPIES:
        yield node.func.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "list" and node.args:
        yield node.args[0]


def _swapped_index(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        if node.slice.upper is not None:
            yield ast.Subscript(node.value, ast.Slice(node.slice.lower, None, None), node.ctx)
        if node.slice.lower is not None:
            yield ast.Subscript(node.value, ast.Slice(None, node.slice.upper, None), node.ctx)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "where":
        yield ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], [])


def _removed_call(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GUARDS:
        yield node.func.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        yield ast.Call(ast.Name("max" if node.func.id == "min" else "min"), node.args, node.keywords)


OPERATORS: Mapping[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "comparison": _comparison,
    "logic": _logic,
    "off-by-one": _off_by_one,
    "dropped copy": _dropped_copy,
    "swapped index": _swapped_index,
    "removed call": _removed_call,
}


def changes(module: str, only: str | None = None) -> Iterator[Change]:
    """Every change of one module, or of one function of it, in the order of the source."""
    text = source_of(module).read_text(encoding="utf-8")
    source = _Source(text)
    seen = Counter[tuple[str, str, str]]()
    for function, node in _nodes(ast.parse(text), only):
        for operator, apply in OPERATORS.items():
            for mutated in apply(node):
                before = source.of(node)
                after = ast.unparse(ast.fix_missing_locations(copy.deepcopy(mutated)))
                seen[function, before, after] += 1
                bare = isinstance(mutated, ast.Pass | ast.Constant)
                yield Change(
                    module=module,
                    line=node.lineno,  # type: ignore[attr-defined]
                    function=function,
                    operator=operator,
                    before=before,
                    after=after,
                    source=source.replaced(node, after if bare else f"({after})"),
                    number=seen[function, before, after],
                )


def _nodes(tree: ast.Module, only: str | None) -> Iterator[tuple[str, ast.AST]]:
    """What runs when the module is used, with the name of the function around it: no annotations, no docstrings, no
    defaults, no assertions, and nothing outside functions."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                yield from walk(statement, f"{function}.{node.name}".lstrip("."))
        elif isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef):
                    yield from walk(statement, node.name)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from walk(node.value, function)
        elif not isinstance(node, ast.Assert | ast.Raise):
            yield function, node
            for child in ast.iter_child_nodes(node):
                yield from walk(child, function)

    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and only in (None, statement.name):
            yield from walk(statement, "")


class _Source:
    """A module's text, cut where its nodes lie: they count lines from 1 and bytes from 0."""

    def __init__(self, text: str) -> None:
        self.raw = text.encode()
        lengths = (len(line) for line in self.raw.splitlines(keepends=True))
        self.starts = list(itertools.accumulate(lengths, initial=0))

    def _ends(self, node: ast.AST) -> tuple[int, int]:
        begin = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def of(self, node: ast.AST) -> str:
        begin, end = self._ends(node)
        return self.raw[begin:end].decode()

    def replaced(self, node: ast.AST, text: str) -> str:
        begin, end = self._ends(node)
        return (self.raw[:begin] + text.encode() + self.raw[end:]).decode()


def _is_int(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int
