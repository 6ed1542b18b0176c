"""What was done to an engine, step by step: a script that can be printed, kept and run again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.contract import Action, Request, Run, SteppedEngine, ask
from harness.invariants import Violation, check
from harness.workloads.lane import Lane, step_bound
from harness.workloads.lanes import LANES
from harness.workloads.strategies import brief
from harness.workloads.verdicts import after_step, at_the_end


@dataclass(frozen=True)
class History:
    """`setup` holds the keywords of `Lane.start`; requests and actions carry their steps."""

    engine: str
    lane: str
    family: str
    setup: Mapping[str, Any]
    requests: tuple[Request, ...]
    actions: tuple[Action, ...] = ()

    def script(self) -> str:
        """A program that runs this history again and ends with what is wrong with it."""
        requests = "".join(f"\n        {brief(request)}," for request in self.requests)
        actions = "".join(f"\n        {brief(action)}," for action in self.actions)
        return (
            "from harness.contract import Action, Request, SamplingParams\n"
            "from harness.workloads.history import History, replay\n\n"
            f"replay(History(\n    engine={self.engine!r},\n    lane={self.lane!r},\n    family={self.family!r},\n"
            f"    setup={dict(self.setup)!r},\n    requests=({requests}\n    ),\n    actions=({actions}\n    ),\n))\n"
        )

    def keep(self, folder: Path) -> Path:
        """Write the script into `folder`; its name tells the lane and the contents."""
        text = self.script()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.lane}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.py"
        path.write_text(text, encoding="utf-8")
        return path


def replay(history: History) -> None:
    """Run a history and judge it after every step and at the end. Raises `InvariantError`."""
    with TemporaryDirectory() as root:
        lane = Lane(history.engine, LANES[history.lane], Path(root))
        with lane.stepped(family=history.family, **history.setup) as engine:
            check(drive(lane, engine, history))


def drive(lane: Lane, engine: SteppedEngine, history: History) -> list[Violation]:
    """The first violations that a step leaves behind, or those of the whole run."""
    session = engine.open()
    last = max([*(request.arrival_step for request in history.requests), *(action.step for action in history.actions)])
    end = step_bound(history.requests) + len(history.actions)
    step = 0
    while step <= last or (session.unfinished and step < end):
        ask(session, step, history.requests, history.actions)
        session.step()
        found = after_step(lane, session.observed(), history.family, engine.fresh_state)
        if found:
            return found
        step += 1
    return at_the_end(lane, session.observed(), baseline(lane, session.observed(), history), history.family)


def baseline(lane: Lane, run: Run, history: History) -> Run:
    """The same requests, all at once and undisturbed, without speculation."""
    setup = {name: value for name, value in history.setup.items() if name in ("k", "context_length")}
    calm = tuple(Request(**_undisturbed(request)) for request in run.requests)
    return lane.run(calm, family=history.family, speculative=False, **setup)


def _undisturbed(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids,
        "sampling": request.sampling,
        "return_hidden_states": request.return_hidden_states,
    }
