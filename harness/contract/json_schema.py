"""The expression of a `json_schema`: all JSON texts of its values, or those alone that grammar engines write.

Canonical texts have the properties of an object in the order in which the schema declares them and, where it declares
any, no others; no space around the whole and no -0; strings of a given length without escapes. Space between tokens is
always free.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from harness.contract.language import Chars, Choice, Node, Recall, Repeat, Sequence, literal, maybe, star

_KNOWN = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
}
"""Keywords by the type that they say something about."""
_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id"}
_ALL = {"type", "enum", "const", "anyOf"} | _ANNOTATIONS
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

SPACE = star(Chars(frozenset(" \n\r\t")))
DIGIT = Chars(frozenset("0123456789"))
NATURAL = Choice((literal("0"), Sequence((Chars(frozenset("123456789")), star(DIGIT)))))
SIGN = maybe(literal("-"))
FRACTION = maybe(Sequence((literal("."), Repeat(DIGIT, 1, None))))
EXPONENT = maybe(Sequence((Chars(frozenset("eE")), maybe(Chars(frozenset("+-"))), Repeat(DIGIT, 1, None))))
NUMBER = Sequence((SIGN, NATURAL, FRACTION, EXPONENT))
HEX = Chars(frozenset("0123456789abcdefABCDEF"))
ESCAPE = Sequence(
    (literal("\\"), Choice((Chars(frozenset('"\\/bfnrt')), Sequence((literal("u"), HEX, HEX, HEX, HEX)))))
)
PLAIN = Chars(frozenset('"\\' + "".join(map(chr, range(32)))), negated=True)
QUOTE = literal('"')
STRING = Sequence((QUOTE, star(Choice((PLAIN, ESCAPE))), QUOTE))


def json_expression(schema: str, *, canonical: bool = False) -> Node:
    """JSON text of a schema -> the texts of its values. Raises ValueError that names a keyword it does not know."""
    try:
        content = json.loads(schema)
    except ValueError as error:
        raise ValueError(f"json_schema={schema!r}: is no JSON: {error}") from error
    value = _Values(canonical).of(content)
    return value if canonical else Sequence((SPACE, value, SPACE))


def _commas(item: Node) -> Node:
    """Any number of further items."""
    return star(Sequence((SPACE, literal(","), SPACE, item)))


def _between(opening: str, inside: Node, closing: str) -> Node:
    return Sequence((literal(opening), SPACE, inside, SPACE, literal(closing)))


def _member(key: Node, value: Node) -> Node:
    return Sequence((key, SPACE, literal(":"), SPACE, value))


@cache
def any_value() -> Node:
    item = Recall(any_value)
    member = _member(STRING, item)
    array = _between("[", maybe(Sequence((item, _commas(item)))), "]")
    members = _between("{", maybe(Sequence((member, _commas(member)))), "}")
    return Choice((members, array, STRING, NUMBER, literal("true"), literal("false"), literal("null")))


class _Values:
    def __init__(self, canonical: bool) -> None:
        self.canonical = canonical

    def of(self, schema: Any) -> Node:
        if schema is True or schema == {}:
            return any_value()
        if not isinstance(schema, dict):
            raise ValueError(f"json_schema: {schema!r} must be an object or true")
        unknown = sorted(set(schema) - _ALL - set().union(*_KNOWN.values()))
        if unknown:
            raise ValueError(f"json_schema: unknown keyword {unknown[0]!r}; known are {sorted(_ALL)} and {_KNOWN}")
        if "const" in schema:
            return literal(json.dumps(schema["const"]))
        if "enum" in schema:
            return Choice(tuple(literal(json.dumps(value)) for value in schema["enum"]))
        if "anyOf" in schema:
            return Choice(tuple(self.of(one) for one in schema["anyOf"]))
        kinds = schema.get("type", list(_TYPES))
        return Choice(tuple(self._typed(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)))

    def _typed(self, kind: str, schema: dict[str, Any]) -> Node:
        match kind:
            case "object":
                return self._object(schema)
            case "array":
                return self._array(schema)
            case "string":
                return self._string(schema)
            case "number":
                return NUMBER
            case "integer":
                return self._integer()
            case "boolean":
                return Choice((literal("true"), literal("false")))
            case "null":
                return literal("null")
        raise ValueError(f"json_schema: unknown type {kind!r}; must be one of {_TYPES}")

    def _integer(self) -> Node:
        if self.canonical:
            above = Sequence((SIGN, Chars(frozenset("123456789")), star(DIGIT)))
            return Choice((literal("0"), above))
        return Sequence((SIGN, NATURAL, maybe(Sequence((literal("."), Repeat(Chars(frozenset("0")), 1, None))))))

    def _string(self, schema: dict[str, Any]) -> Node:
        if not _KNOWN["string"] & set(schema):
            return STRING
        char = PLAIN if self.canonical else Choice((PLAIN, ESCAPE))
        return Sequence((QUOTE, Repeat(char, schema.get("minLength", 0), schema.get("maxLength")), QUOTE))

    def _array(self, schema: dict[str, Any]) -> Node:
        item = self.of(schema.get("items", True))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return _between("[", Sequence(()), "]")
        further = Repeat(
            Sequence((SPACE, literal(","), SPACE, item)), max(least - 1, 0), None if most is None else most - 1
        )
        some = Sequence((item, further))
        return _between("[", some if least else maybe(some), "]")

    def _object(self, schema: dict[str, Any]) -> Node:
        declared = {
            name: _member(literal(json.dumps(name)), self.of(one)) for name, one in schema.get("properties", {}).items()
        }
        required = frozenset(schema.get("required", ()))
        extra = schema.get("additionalProperties", not (self.canonical and declared))
        other = None if extra is False else _member(STRING, self.of(extra))
        return _between("{", self._members(declared, required, other), "}")

    def _members(self, declared: dict[str, Node], required: frozenset[str], other: Node | None) -> Node:
        """Members of which every declared one comes at most once, the required ones once."""
        comma = Sequence((SPACE, literal(","), SPACE))

        @cache
        def rest(names: tuple[str, ...], first: bool) -> Node:
            """What may follow when `names` are still to come."""
            options: list[Node] = []
            for place, name in enumerate(names):
                after = names[place + 1 :] if self.canonical else names[:place] + names[place + 1 :]
                if not self.canonical or not required.intersection(names[:place]):
                    options.append(Sequence((*([] if first else [comma]), declared[name], rest(after, False))))
            if other is not None:
                more = Recall(lambda: rest(names, False))
                options.append(Sequence((*([] if first else [comma]), other, more)))
            if not required.intersection(names):
                options.append(Sequence(()))
            return Choice(tuple(options))

        return rest(tuple(declared), True)
