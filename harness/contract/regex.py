"""The expression of a `regex`, matched whole: the part of the notation that all grammar engines share."""

from __future__ import annotations

import string

from harness.contract.language import Chars, Choice, Node, Repeat, Sequence

_DIGITS = frozenset(string.digits)
_WORD = frozenset(string.ascii_letters + string.digits + "_")
_SPACE = frozenset(" \t\n\r\f\v")
_CLASSES = {
    "d": Chars(_DIGITS),
    "D": Chars(_DIGITS, negated=True),
    "w": Chars(_WORD),
    "W": Chars(_WORD, negated=True),
    "s": Chars(_SPACE),
    "S": Chars(_SPACE, negated=True),
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}


def regex_expression(pattern: str) -> Node:
    """Literals, escapes, `.`, classes, groups, `|`, `* + ?` and `{m,n}`. Raises ValueError that names what it does not
    know, and where."""
    parser = _Parser(pattern)
    node = parser.choice()
    if not parser.at_end:
        parser.fail("unbalanced )")
    return node


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.place = 0

    @property
    def at_end(self) -> bool:
        return self.place == len(self.pattern)

    @property
    def here(self) -> str:
        return self.pattern[self.place : self.place + 1]

    def fail(self, why: str) -> None:
        raise ValueError(f"regex={self.pattern!r}: {why} at {self.place}; write it with what `regex_expression` knows")

    def take(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.place)
        self.place += len(text) if found else 0
        return found

    def next(self) -> str:
        if self.at_end:
            self.fail("it ends too early")
        self.place += 1
        return self.pattern[self.place - 1]

    def choice(self) -> Node:
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def sequence(self) -> Node:
        parts = []
        while not self.at_end and self.here not in "|)":
            parts.append(self.repeated(self.atom()))
        return Sequence(tuple(parts))

    def repeated(self, node: Node) -> Node:
        bounds: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        while self.here and self.here in "*+?{":
            sign = self.next()
            node = Repeat(node, *(bounds[sign] if sign in bounds else self.bounds()))
        return node

    def bounds(self) -> tuple[int, int | None]:
        inside = ""
        while not self.take("}"):
            inside += self.next()
        least, comma, most = inside.partition(",")
        if not least.isdigit() or not (most.isdigit() or not most):
            self.fail(f"{{{inside}}} is no number of times")
        if not comma:
            return int(least), int(least)
        return int(least), int(most) if most else None

    def atom(self) -> Node:
        char = self.next()
        if char == "(":
            if self.here == "?" and not self.take("?:"):
                self.fail("unknown kind of group")
            node = self.choice()
            if not self.take(")"):
                self.fail("missing )")
            return node
        if char == "[":
            return self.char_class()
        if char == ".":
            return Chars(frozenset("\n"), negated=True)
        if char in "*+?{^$":
            self.fail(f"{char} stands where nothing goes before it, or is no character")
        return self.escape() if char == "\\" else Chars(frozenset({char}))

    def escape(self) -> Chars:
        char = self.next()
        if char in _CLASSES:
            return _CLASSES[char]
        if char.isalnum() and char not in _CONTROLS:
            self.fail(f"unknown escape \\{char}")
        return Chars(frozenset({_CONTROLS.get(char, char)}))

    def char_class(self) -> Node:
        negated = self.take("^")
        chosen: set[str] = set()
        while not self.take("]"):
            char = self.next()
            if char == "\\":
                escaped = self.escape()
                if escaped.negated:
                    self.fail("a negated class inside a class")
                chosen |= escaped.chosen
                if len(escaped.chosen) > 1:
                    continue
                (char,) = escaped.chosen
            if self.here == "-" and self.pattern[self.place + 1 : self.place + 2] != "]":
                self.next()
                last = self.next()
                if last == "\\":
                    (last,) = self.escape().chosen
                chosen |= {chr(code) for code in range(ord(char), ord(last) + 1)}
            chosen.add(char)
        return Chars(frozenset(chosen), negated)
