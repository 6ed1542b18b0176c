"""Runs on disk: recorded here or by anybody's engine, checked later and elsewhere. docs/trace.md has the form."""

from harness.record.read import read
from harness.record.schema import VERSION, BadTrace, NotRecorded
from harness.record.write import write

__all__ = ["VERSION", "BadTrace", "NotRecorded", "read", "write"]
