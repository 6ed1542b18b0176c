"""The comment on a pull request: which cells of the scorecard are not as on the main branch.

The scorecards of the pull request were written by foreign code, so nothing of them is shown but names of a plain form
and the four statuses. Only the standard library is needed: nothing is installed where this runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MARKER = "<!-- draftproof comparison -->"
WORST_FIRST = ("error", "fail", "pass", "refused")
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:-]{0,59}")
LARGEST = 20 * 2**20
"""Bytes of a scorecard that is still read."""
ROWS = 40

Cells = dict[tuple[str, str, str], str]
"""Status by engine, drafter and invariant."""


def read(folder: Path) -> tuple[Cells, int]:
    """The cells of all scorecards in a folder, the worst status of each, and how many entries made no sense. A shard
    says nothing of a cell whose tests are in another one."""
    cells: Cells = {}
    nonsense = 0
    for path in sorted(folder.rglob("scorecard.json")):
        if path.is_symlink() or path.stat().st_size > LARGEST:
            nonsense += 1
            continue
        for entry in _entries(path):
            key, status = _cell(entry)
            if key is None:
                nonsense += 1
            elif entry.get("tests") != 0:
                cells[key] = min(status, cells.get(key, status), key=WORST_FIRST.index)
    return cells, nonsense


def _entries(path: Path) -> Iterator[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    yield from found if isinstance(found, list) else [None]


def _cell(entry: Any) -> tuple[tuple[str, str, str] | None, str]:
    if not isinstance(entry, dict):
        return None, ""
    names = [entry.get(name) for name in ("engine", "drafter", "invariant")]
    status = entry.get("status")
    if status not in WORST_FIRST or not all(isinstance(name, str) and PLAIN.fullmatch(name) for name in names):
        return None, ""
    engine, drafter, invariant = names
    return (str(engine), str(drafter), str(invariant)), str(status)


def comment(base: Cells, head: Cells, nonsense: int, sha: str) -> str:
    """Markdown, beginning with the marker by which it is found again."""
    lines = [MARKER, f"### Conformance at `{sha if PLAIN.fullmatch(sha) else '?'}`", "", _summary(head)]
    if not base:
        lines += ["", "The main branch has no scorecard to compare with."]
    elif head:
        lines += ["", *_differences(base, head)]
    if nonsense:
        lines += [
            "",
            f"{nonsense} entries of the scorecards are not of the form that a run writes; they were left out.",
        ]
    return "\n".join(lines) + "\n"


def _summary(cells: Cells) -> str:
    counts = Counter(cells.values())
    told = ", ".join(f"{counts[status]} {status}" for status in WORST_FIRST if counts[status])
    return f"{len(cells)} cells: {told}." if cells else "No scorecard was written: see the jobs of CI."


def _differences(base: Mapping[tuple[str, str, str], str], head: Mapping[tuple[str, str, str], str]) -> Iterator[str]:
    changed = sorted(key for key in {*base, *head} if base.get(key) != head.get(key))
    if not changed:
        yield "No cell differs from the main branch."
        return
    yield "| engine | drafter | invariant | main | here |"
    yield "| --- | --- | --- | --- | --- |"
    for key in changed[:ROWS]:
        statuses = (base.get(key, "-"), head.get(key, "-"))
        yield f"| {' | '.join(f'`{name}`' for name in key)} | {' | '.join(statuses)} |"
    if len(changed) > ROWS:
        yield ""
        yield f"And {len(changed) - ROWS} more."


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--base", type=Path, required=True, help="folder with scorecards of the main branch")
    parser.add_argument("--head", type=Path, required=True, help="folder with scorecards of the pull request")
    parser.add_argument("--sha", required=True, help="the commit of the pull request")
    parser.add_argument("--out", type=Path, required=True, help="where the comment goes")
    options = parser.parse_args(arguments)
    base, _ = read(options.base)
    head, nonsense = read(options.head)
    options.out.write_text(comment(base, head, nonsense, options.sha), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
