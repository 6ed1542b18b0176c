"""`draftproof ci` without the rest of `draftproof`, whose import takes seconds."""

from __future__ import annotations

import sys

from ci.cli import app


def main() -> None:
    """Wrong input ends as in `harness.cli.main`."""
    app.pretty_exceptions_enable = False
    try:
        app(prog_name="draftproof ci")
    except ValueError as error:
        sys.exit(f"error: {error}")
