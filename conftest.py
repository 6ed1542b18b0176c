"""Shared by every suite. The `draftproof` plugin itself comes from the installed entry point."""

from __future__ import annotations

pytest_plugins = ["pytester"]
