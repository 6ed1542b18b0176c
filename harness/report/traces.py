"""What `draftproof check` says about a recorded run."""

from __future__ import annotations

from pathlib import Path

from harness.contract import Run
from harness.invariants import offers
from harness.invariants.base import applicable, shorten
from harness.known_answer import FAMILIES
from harness.record import read
from harness.report.table import plural
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.verdicts import of_a_recording


def judged(folder: Path, baseline: Path | None, family: str, drafter: str) -> tuple[str, bool]:
    """A report and whether nothing is broken. Raises ValueError for a name that there is not, and for a bad trace."""
    lane = _lane(family, drafter)
    run = read(folder)
    found = of_a_recording(run, None if baseline is None else read(baseline), lane, family)
    checked = sorted({known.id for known, _ in applicable(run)} | ({"EQUAL-1"} if baseline else set()))
    lines = [f"{folder}: {_told(run)}", f"  checked: {', '.join(checked)}"]
    if lane is not None:
        lines.append(f"  and the closed forms of {family} with {drafter}")
    broken = dict.fromkeys(violation.invariant for violation in found)
    told = f"{plural(len(found), 'violation')} of {', '.join(broken)}" if found else "nothing is broken"
    lines.append(f"  {told}")
    lines += [violation.render() for violation in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"... and {len(found) - SHOWN} more")
    return "\n".join(lines), not found


SHOWN = 10
"""Violations that are told in full."""


def _told(run: Run) -> str:
    drafter = run.setup.drafter
    what = "no speculation" if drafter is None else f"{drafter.method}, {drafter.num_draft_tokens - 1} drafts"
    seen = ", ".join(sorted(offers(run) - {"completion"})) or "completions only"
    counts = f"{len(run.requests)} requests, {len(run.steps)} steps"
    return f"{run.capabilities.engine} {shorten(run.capabilities.version, 40)}, {what}; {counts}; offers {seen}"


def _lane(family: str, drafter: str) -> Lane | None:
    if not family and not drafter:
        return None
    if family not in FAMILIES:
        raise ValueError(f"--family {family!r}: must be one of {', '.join(FAMILIES)}, with --drafter")
    if drafter not in LANES:
        raise ValueError(f"--drafter {drafter!r}: must be one of {', '.join(LANES)}, with --family")
    return Lane("reference", LANES[drafter], Path())
