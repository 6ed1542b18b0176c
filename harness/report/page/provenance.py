"""Which hidden row was delivered where: each request's rows in a line, and an arrow from where a wrong one belongs."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from markupsafe import Markup

from harness.report.page import svg
from harness.report.page.base import Panel, render
from harness.report.page.inputs import Inputs
from harness.report.page.palette import MARKS
from harness.report.page.recordings import Recording, Row, Strip
from harness.report.table import plural

PICTURES, ENOUGH = 4, 8
"""Runs with wrong rows that are drawn, and rows in one that make it worth while."""
LISTED = 40
"""Wrong rows of one run that are listed."""
COLUMNS, LINES = 160, 24
"""Rows of one request, and requests of one run, that are drawn."""
CELL, LINE, TOP = 13, 40, 24


def panel(inputs: Inputs) -> Panel | None:
    known = [one for one in inputs.recordings if one.readable]
    if not known:
        return None
    unread = sum(any(strip.rows for strip in one.strips) for one in inputs.recordings) - len(known)
    wrong = sorted((one for one in known if one.wrong_rows), key=_told_best)
    first = {(one.engine, one.version, one.lane): one for one in reversed(wrong)}.values()
    wrong.sort(key=lambda one: not any(one is other for other in first))
    rows = sum(len(strip.rows) for one in known for strip in one.strips)
    bad = sum(one.wrong_rows for one in known)
    shown = wrong[:PICTURES] or [max(known, key=lambda one: sum(len(strip.rows) for strip in one.strips))]
    return Panel(
        id="provenance",
        title="Where hidden rows came from",
        lead=f"{rows} rows of {plural(len(known), 'run')} were held against the row of their own tokens: "
        f"{rows - bad} are right, {bad} are not" + (f", in {plural(len(wrong), 'run')}." if wrong else "."),
        body=render(
            "provenance.html",
            runs=[(one, draw(one.strips, one.label), wrong_rows(one.strips)) for one in shown],
            left=len(wrong) - len(shown) if wrong else 0,
            unread=unread,
        ),
    )


def _told_best(one: Recording) -> tuple[int, int]:
    """Enough rows that can be traced, and then as few as there are."""
    return -min(one.traced_rows, ENOUGH), one.wrong_rows


def wrong_rows(strips: Sequence[Strip]) -> tuple[list[tuple[str, int, str, str]], int]:
    """((request, row, whose row came, what it says) of the first wrong rows, how many more there are)."""
    found = [
        (strip.owner, place, _came(strip.rows[place]), strip.rows[place].says)
        for strip in strips
        for place in strip.wrong
    ]
    return found[:LISTED], max(0, len(found) - LISTED)


def _came(row: Row) -> str:
    if row.source is None:
        return "no request's row"
    others = f" or one of {row.others} that are equal" if row.others else ""
    return f"row {row.source[1]} of {row.source[0]}{others}"


def draw(strips: Sequence[Strip], label: str) -> Markup:
    """One line per request. A wrong row is crossed and has the letter of its owner; arrows start where it belongs."""
    strips = strips[:LINES]
    names = 8 + 7 * max((min(len(strip.owner), 18) for strip in strips), default=0)
    left = max(names + 34, 60)
    places = {strip.owner: number for number, strip in enumerate(strips)}
    width = left + CELL * min(COLUMNS, max((len(strip.rows) for strip in strips), default=1)) + 14
    drawn = [element for number, strip in enumerate(strips) for element in _line(strip, number, left, places)]
    arrows = [arrow for number, strip in enumerate(strips) for arrow in _arrows(strip, number, left, places)]
    total = sum(len(strip.wrong) for strip in strips)
    words = f"{label}: hidden rows of {plural(len(strips), 'request')}, {total} wrong"
    return svg.picture(width, TOP + LINE * (len(strips) - 1) + CELL + 20, words, [*arrows, *drawn])


def letter(number: int) -> str:
    """A, B, ... Z, A1, ..."""
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def _line(strip: Strip, number: int, left: int, places: dict[str, int]) -> list[Element]:
    y = TOP + LINE * number
    name = strip.owner if len(strip.owner) <= 18 else strip.owner[:17] + "…"
    mark = f"m{number % MARKS + 1}"
    drawn = [svg.text(4, y + 11, letter(number), f"small strong {mark}"), svg.text(22, y + 11, name, "small")]
    for place, row in enumerate(strip.rows[:COLUMNS]):
        x, right = left + CELL * place, strip.is_right(place)
        part = "prompt" if place < strip.prompt_len else "output"
        came = "its own" if right else _came(row)
        kind = f"row {part} {mark}" if right else "row wrong"
        drawn.append(
            svg.rect(x + 1, y, CELL - 2, CELL + 2, kind, f"{strip.owner}, {part} row {place}: {came} {row.says}")
        )
        if not right:
            sign = letter(places[row.source[0]]) if row.source and row.source[0] in places else "?"
            drawn.append(svg.text(x + CELL / 2, y + 11.5, sign, "sign", "middle"))
    if strip.rows:
        drawn.append(svg.text(left + CELL / 2, y - 4, "0", "tiny muted", "middle"))
    for place in range(10, min(len(strip.rows), COLUMNS), 10):
        drawn.append(svg.text(left + CELL * (place + 0.5), y - 4, str(place), "tiny muted", "middle"))
    return drawn


def _arrows(strip: Strip, number: int, left: int, places: dict[str, int]) -> list[Element]:
    drawn = []
    for place in strip.wrong:
        source = strip.rows[place].source
        if source is None or strip.rows[place].others or source[0] not in places or max(place, source[1]) >= COLUMNS:
            continue
        below = places[source[0]] <= number
        x1, x2 = left + CELL * (source[1] + 0.5), left + CELL * (place + 0.5)
        y1 = TOP + LINE * places[source[0]] + (CELL + 3 if below else -1)
        y2 = TOP + LINE * number + (-1 if below and places[source[0]] != number else CELL + 3)
        bend = 14 if y1 < y2 or places[source[0]] == number else -14
        far = bend if places[source[0]] == number else -bend
        path = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 + far:.1f} {x2:.1f} {y2:.1f}"
        tip = 5 if far > 0 else -5
        drawn.append(svg.element("path", d=path, class_="arrow"))
        drawn.append(svg.element("path", d=f"M{x2 - 3:.1f} {y2 + tip:.1f}h6l-3 {-tip}z", class_="head"))
    return drawn
