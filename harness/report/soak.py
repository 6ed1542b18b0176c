"""A soak as it goes: one line a round, and the first thing that is wrong."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.soak import Round, soak

FAMILY = "walk"
HEAD = f"{'round':>6} {'requests':>9} {'steps':>8} {'accepted':>9} {'hits':>6} {'free':>6} {'MiB':>7} {'ms/step':>8}"


def watch(engine: str, drafter: str, steps: int, every: int) -> int:
    """Print rounds; exit code 1 and the violations at the first one that has any. Raises ValueError for a lane that
    there is not, and `Refused` where the engine declines it."""
    if drafter not in LANES:
        raise ValueError(f"--drafter {drafter}: there is none of that name; choose from {', '.join(LANES)}")
    console = Console()
    with TemporaryDirectory() as root:
        lane = Lane(engine, LANES[drafter], Path(root))
        requests = total = 0
        console.print(HEAD)
        with lane.start(family=FAMILY, page_size=4, num_pages=120) as started:
            for number, (round_, violations) in enumerate(soak(lane, started, vocabulary(FAMILY), steps), 1):
                requests, total = requests + round_.requests, total + round_.steps
                if (number - 1) % every == 0 or violations or total >= steps:
                    console.print(_line(number, requests, total, round_), highlight=False)
                for violation in violations:
                    console.print(violation.render(), markup=False, highlight=False)
                if violations:
                    return 1
    return 0


def _line(number: int, requests: int, total: int, round_: Round) -> str:
    accepted = "-" if round_.acceptance is None else f"{round_.acceptance:.4f}"
    free = "-" if round_.free_pages is None else str(round_.free_pages)
    return (
        f"{number:6} {requests:9} {total:8} {accepted:>9} {round_.hits:6.3f} {free:>6} {round_.resident:7.1f} "
        f"{1000 * round_.seconds:8.2f}"
    )
