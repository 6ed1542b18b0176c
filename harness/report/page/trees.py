"""Draft trees of a few verify steps of each drafter, with the accepted path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from xml.etree.ElementTree import Element

from markupsafe import Markup

from harness.contract import PLACEHOLDER
from harness.report.page import svg
from harness.report.page.base import Panel, render
from harness.report.page.inputs import Inputs
from harness.report.page.recordings import Block, Recording

STEPS_SHOWN = 6
"""Verify steps drawn of one drafter."""
NODES_SHOWN = 64
"""Nodes drawn of one tree: a wider one is cut, and says so."""
DX, DY, RADIUS, PAD = 52.0, 32.0, 12.0, 20.0


def panel(inputs: Inputs) -> Panel | None:
    groups = {title: examples(blocks) for title, blocks in _by_drafter(inputs.recordings).items()}
    if not groups:
        return None
    drawn = {title: [(block, _told(block), draw(block)) for block in blocks] for title, blocks in groups.items()}
    return Panel(
        id="trees",
        title="Draft trees",
        lead="From the last committed token (square) through the drafts (circles) of one verify step. Thick edges and "
        "filled nodes were accepted; the diamond is the token that the target added; crossed nodes were rejected.",
        body=render("trees.html", groups=drawn),
    )


def _by_drafter(recordings: Iterable[Recording]) -> dict[str, list[tuple[str, Block]]]:
    groups: dict[str, list[tuple[str, Block]]] = {}
    for one in recordings:
        groups.setdefault(f"{one.lane}, {one.engine} {one.version}", []).extend((one.label, b) for b in one.blocks)
    return {title: groups[title] for title in sorted(groups) if groups[title]}


def examples(blocks: Sequence[tuple[str, Block]]) -> list[Block]:
    """The fullest draft for each number of accepted drafts, then others, up to `STEPS_SHOWN`, by length of the path."""
    full = sorted((block for _, block in blocks), key=lambda b: -sum(token != PLACEHOLDER for token in b.drafts))
    chosen: dict[int, Block] = {}
    for block in full:
        chosen.setdefault(len(block.path), block)
    taken = list(chosen.values())[:STEPS_SHOWN]
    taken += [block for block in full if not any(block is other for other in taken)][: STEPS_SHOWN - len(taken)]
    return sorted(taken, key=lambda block: (len(block.path), block.step))


def _told(block: Block) -> str:
    drafted = sum(token != PLACEHOLDER for token in block.drafts)
    return f"request {block.owner}, step {block.step}: {len(block.path)} of {drafted} drafts accepted"


def draw(block: Block) -> Markup:
    """The tree from left to right, children below one another. Also in words, for those who cannot see it."""
    shown = [i + 1 for i, token in enumerate(block.drafts) if token != PLACEHOLDER][:NODES_SHOWN]
    children = {node: [c for c in shown if block.parents[c - 1] == node] for node in (0, *shown)}
    places: dict[int, tuple[float, float]] = {}
    _lay(0, 0, 0.0, children, places)
    accepted = {0, *block.path}
    drawn: list[Element] = []
    for node, (x, y) in places.items():
        if node:
            from_x, from_y = places[block.parents[node - 1]]
            on = node in accepted
            drawn.append(_edge(from_x, from_y, x, y, "edge on" if on else "edge"))
    end = places[block.path[-1] if block.path and block.path[-1] in places else 0]
    target = _behind(end, places) if block.last is not None else end
    if block.last is not None:
        drawn += _last(block.last, end, target)
    for node, (x, y) in places.items():
        drawn += _node(block, node, x, y, node in accepted)
    width, height = (max(ends) + PAD for ends in zip(target, *places.values(), strict=True))
    words = f"{_told(block)}; path {[block.drafts[n - 1] for n in block.path]}, then {block.last}"
    return svg.picture(width, height, words, drawn)


def _lay(
    node: int, depth: int, row: float, children: dict[int, list[int]], places: dict[int, tuple[float, float]]
) -> float:
    """Give the node and all below it a place -> the first row that is free after them."""
    places[node] = (PAD + depth * DX, PAD + row * DY)
    next_row = row
    for child in children[node]:
        next_row = _lay(child, depth + 1, next_row, children, places)
    return max(next_row, row + 1)


def _behind(end: tuple[float, float], places: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """The first free place to the right of the end of the path."""
    x, y = end[0] + DX, end[1]
    while (x, y) in places.values():
        y += DY
    return x, y


def _last(token: int, end: tuple[float, float], target: tuple[float, float]) -> Iterator[Element]:
    x, y = target
    yield _edge(*end, x, y, "edge on")
    size = RADIUS + 2
    corners = f"{x},{y - size} {x + size},{y} {x},{y + size} {x - size},{y}"
    yield svg.element(
        "polygon", svg.element("title", f"token {token}, added by the target"), points=corners, class_="node last"
    )
    yield svg.text(x, y + 4, str(token), "id last", "middle")


def _node(block: Block, node: int, x: float, y: float, on: bool) -> Iterator[Element]:
    if node == 0:
        hint = "last committed token"
        yield svg.rect(x - RADIUS, y - RADIUS, 2 * RADIUS, 2 * RADIUS, "node root", hint)
        yield svg.text(x, y + 4, "·" if block.root is None else str(block.root), "id", "middle")
        return
    token = block.drafts[node - 1]
    told = svg.element("title", f"draft {node}: token {token}, {'accepted' if on else 'rejected'}")
    yield svg.element("circle", told, cx=x, cy=y, r=RADIUS, class_="node on" if on else "node off")
    yield svg.text(x, y + 4, str(token), "id on" if on else "id", "middle")
    if not on:
        yield svg.line(x - 8, y + 8, x + 8, y - 8, "strike")


def _edge(x1: float, y1: float, x2: float, y2: float, class_: str) -> Element:
    middle = (x1 + x2) / 2
    return svg.element(
        "path", d=f"M{x1:.1f} {y1:.1f}C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} {x2:.1f} {y2:.1f}", class_=class_
    )
