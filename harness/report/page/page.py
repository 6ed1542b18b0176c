"""The whole page: one file without any reference to another, and a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from importlib.resources import files

from markupsafe import Markup

from harness.report.page import acceptance, differences, palette, provenance, scorecards, timing, trees, trends, zoo
from harness.report.page.base import Panel, render
from harness.report.page.inputs import Inputs
from harness.report.page.scorecards import layout

PANELS: tuple[Callable[[Inputs], Panel | None], ...] = (
    scorecards.panel,
    differences.panel,
    provenance.panel,
    acceptance.panel,
    trees.panel,
    timing.panel,
    trends.panel,
    zoo.panel,
)
"""In the order of the page. One that has nothing to show gives None."""


def page(inputs: Inputs, title: str, date: str = "") -> str:
    """HTML. `date` says when it was made, in any words."""
    panels = [panel for make in PANELS if (panel := make(inputs)) is not None]
    style, script = palette.css() + _file("page.css"), _file("page.js")
    made = render(
        "page.html",
        title=title,
        date=date,
        panels=panels,
        grids=layout(inputs),
        sources=inputs.sources,
        policy="; ".join(
            (
                "default-src 'none'",
                f"style-src 'sha256-{_digest(style)}'",
                f"script-src 'sha256-{_digest(script)}'",
                "base-uri 'none'",
                "form-action 'none'",
            )
        ),
        style=Markup(style),
        script=Markup(script),
    )
    return str(made)


def _file(name: str) -> str:
    return (files("harness.report.page") / "templates" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
