"""Inline SVG. Colours come from classes, since the page's policy lets no style attribute through."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, tostring

from markupsafe import Markup

from harness.report.page.base import visible


def element(tag: str, *children: Element | str | None, **attributes: object) -> Element:
    """`class_` stands for `class`, an underscore inside a name for a hyphen; numbers are written shortly."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): _word(value) for name, value in attributes.items()})
    for child in children:
        if isinstance(child, str):
            made.text = visible(child)
        elif child is not None:
            made.append(child)
    return made


def picture(width: float, height: float, label: str, children: Iterable[Element]) -> Markup:
    """A whole drawing with a name for those who cannot see it."""
    size = {"viewBox": f"0 0 {_word(width)} {_word(height)}", "width": width, "height": height}
    root = element("svg", element("title", label), role="img", aria_label=label, **size)
    root.extend(children)
    return Markup(tostring(root, encoding="unicode"))


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start") -> Element:
    return element("text", words, x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Element:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, hint: str = "") -> Element:
    """`hint` is shown by a pointer that rests on it."""
    shown = element("title", hint) if hint else None
    return element("rect", shown, x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), class_=class_)


def polyline(points: Sequence[tuple[float, float]], class_: str) -> Element:
    return element("polyline", points=" ".join(f"{_word(x)},{_word(y)}" for x, y in points), class_=class_)


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers inside [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * times for times in (1, 2, 2.5, 5, 10) if size * times >= raw)
    first = math.ceil(low / step - 1e-9)
    return [step * place for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _word(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else visible(str(value))
