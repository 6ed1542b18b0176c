"""`draftproof ci` and `draftproof campaign` without the rest of `draftproof`, whose import takes seconds."""

from __future__ import annotations

import sys

from ci.campaign import campaign
from ci.cli import app


def main() -> None:
    """Wrong input ends as in `harness.cli.main`."""
    app.pretty_exceptions_enable = False
    app.command("campaign")(campaign)
    try:
        app(prog_name="draftproof ci")
    except ValueError as error:
        sys.exit(f"error: {error}")
