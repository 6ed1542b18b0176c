"""What the `regex` and `json_schema` of a request mean: sets of texts, read one character at a time.

An expression is a small graph of nodes; a reading of a text is the set of all ways to go on, each a stack of what is
still to come. Nothing is compiled and no engine is asked, so that grammars of engines can be held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, eq=False)
class Chars:
    """One character: of `chosen`, or with `negated` any other."""

    chosen: frozenset[str]
    negated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """`least` to `most` times, None = no end."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Recall:
    """The node that `make` returns, always the same one: how an expression may hold itself."""

    make: Callable[[], Node]


Node: TypeAlias = "Chars | Sequence | Choice | Repeat | Recall"
Stack: TypeAlias = "tuple[()] | tuple[Node, int, Stack]"
"""What is still to come, the next first, each node with how often it came already. Empty: the text may end."""


def literal(text: str) -> Node:
    return Sequence(tuple(Chars(frozenset({char})) for char in text))


def star(part: Node) -> Node:
    return Repeat(part, 0, None)


def maybe(part: Node) -> Node:
    return Repeat(part, 0, 1)


@dataclass(frozen=True)
class Reading:
    """What may follow a text. `alive`: some text of the language begins with it; `complete`: it is one itself."""

    stacks: frozenset[Stack]

    @property
    def alive(self) -> bool:
        return bool(self.stacks)

    @property
    def complete(self) -> bool:
        return () in self.stacks

    @property
    def choices(self) -> str:
        """What may follow, in words."""
        said = {("any but " if node.negated else "") + repr("".join(sorted(node.chosen))) for node in self._tops}
        return " or ".join([*sorted(said), *["the end"] * self.complete]) or "nothing"

    @property
    def _tops(self) -> Iterator[Chars]:
        for stack in self.stacks:
            if stack:
                assert isinstance(stack[0], Chars)
                yield stack[0]

    def lets(self, text: str) -> bool:
        """Whether the text may follow."""
        return self.after(text).alive

    def after(self, text: str) -> Reading:
        reading = self
        for char in text:
            reading = Reading(frozenset(reading._over(char)))
        return reading

    def _over(self, char: str) -> Iterator[Stack]:
        for stack in self.stacks:
            if stack:
                node, _, rest = stack
                assert isinstance(node, Chars)
                if (char in node.chosen) != node.negated:
                    yield from _expanded(rest)


def reading_of(node: Node) -> Reading:
    """The reading of the empty text."""
    return Reading(frozenset(_expanded((node, 0, ()))))


def _expanded(stack: Stack) -> set[Stack]:
    """The stacks that a stack stands for, each with a character on top or empty."""
    found: set[Stack] = set()
    seen: set[Stack] = set()
    waiting = [stack]
    while waiting:
        here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        if not here or isinstance(here[0], Chars):
            found.add(here)
        else:
            waiting += _alternatives(*here)
    return found


def _alternatives(node: Node, done: int, rest: Stack) -> Iterator[Stack]:
    match node:
        case Sequence(parts):
            for part in reversed(parts):
                rest = (part, 0, rest)
            yield rest
        case Choice(options):
            for option in options:
                yield (option, 0, rest)
        case Repeat(part, least, most):
            if done >= least:
                yield rest
            if most is None or done < most:
                # Past `least` an endless repetition need not be counted: the same stack comes back, and is seen.
                count = min(done + 1, least) if most is None else done + 1
                yield (part, 0, (node, count, rest))
        case Recall(make):
            yield (make(), 0, rest)
