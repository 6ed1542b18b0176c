"""What panels share: the panel itself, templates that escape, and strings that show what would be invisible."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

SYMBOLS = {"pass": "✓", "fail": "✗", "error": "!", "refused": "⊘"}
"""By status. Colour never says anything that these do not."""

_STYLED = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One section of the page: `id` is its anchor, `lead` one sentence that says how to read it."""

    id: str
    title: str
    lead: str
    body: Markup


def visible(text: str) -> str:
    """The text without terminal colours; control characters, bidirectional marks and lone surrogates as `\\uXXXX`."""
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", _STYLED.sub("", text))


def render(template: str, **values: object) -> Markup:
    """A file of `templates/` with every value escaped."""
    return Markup(_templates().get_template(template).render(values))


@cache
def _templates() -> Environment:
    def shown(value: object) -> object:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    made = Environment(
        loader=PackageLoader("harness.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["symbols"] = SYMBOLS
    made.filters["short"] = short
    return made


def short(value: float) -> str:
    """Four significant digits, with thousands apart: `12 340`, `0.01234`."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\u2009")
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """With a unit that suits it."""
    for unit, size in (("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size * (2 if unit == "min" else 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def distinct(values: Iterable[str]) -> list[str]:
    """In order of first appearance."""
    return list(dict.fromkeys(values))
