"""An HTML page as a flat list of its elements, for looking at what a browser would make of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "input", "br", "link", "img", "hr"}


@dataclass(slots=True)
class Element:
    """`text` is that of the element and of everything inside it."""

    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    inside: list[Element] = field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Every element below with that tag and those attributes; `class_` is one of its classes."""
        return [one for one in self.walk() if one.tag == tag and one.has(**attributes)]

    def has(self, **attributes: str) -> bool:
        class_ = attributes.pop("class_", None)
        if class_ is not None and class_ not in (self.attributes.get("class") or "").split():
            return False
        return all(self.attributes.get(name.replace("_", "-")) == value for name, value in attributes.items())

    def walk(self) -> Iterator[Element]:
        for one in self.inside:
            yield one
            yield from one.walk()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("document", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice: {attrs}"
        made = Element(tag, dict(attrs))
        self.open[-1].inside.append(made)
        if tag not in VOID:
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for one in self.open:
            one.text += data


def parse(html: str) -> Element:
    """Raises AssertionError for a tag that is not closed, or closed in the wrong place."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert [one.tag for one in reader.open] == ["document"], f"not closed: {reader.open[-1].tag}"
    return reader.root
