"""A state machine that does to an engine whatever can be done to it, and judges it after every step."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from harness.contract import Action, ActionName, Request, Run, Session, SteppedEngine
from harness.invariants import InvariantError, Violation
from harness.workloads.history import History, baseline
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane, step_bound
from harness.workloads.strategies import request as any_request
from harness.workloads.verdicts import after_step, at_the_end

FAMILY = "census"
"""Its tokens and rows tell most about what went wrong."""

MAX_REQUESTS = 6
POOL_SLACK = (0, 8)
"""Pages beyond what one request needs: few, so that requests push each other out."""


class EngineMachine(RuleBasedStateMachine):
    """What the rules ask for is done before the next step: arrivals, then aborts, then actions, as `Engine.run` does.

    Freed memory is poisoned and snapshots are taken. A history that breaks an invariant is written into `folder` as a
    script, which the error shows.
    """

    def __init__(self, lane: Lane, folder: Path) -> None:
        super().__init__()
        self.lane, self.folder = lane, folder
        self.words = vocabulary(FAMILY)
        self.trunk = self.words.prompt(12, 7)
        self.claimed = lane.capabilities.features
        self.resources = ExitStack()
        self.setup: dict[str, Any] = {}
        self.engine: SteppedEngine
        self.session: Session
        self.arrivals: list[Request] = []
        self.aborts: list[str] = []
        self.actions: list[Action] = []
        self.asked: list[Request] = []
        self.steps = 0
        self.resting: ActionName | None = None

    @initialize(
        k=st.integers(1, 4),
        page_size=st.sampled_from((1, 4)),
        slack=st.integers(*POOL_SLACK),
        schedule=st.fixed_dictionaries(
            {
                "chunk_size": st.sampled_from((3, 8, 64)),
                "max_running": st.integers(2, 4),
                "overlap": st.booleans(),
                "batch_buckets": st.sampled_from(((), (4,))),
                "prefix_cache": st.booleans(),
            }
        ),
    )
    def start(self, k: int, page_size: int, slack: int, schedule: dict[str, Any]) -> None:
        longest = 40 + 3 + 14 + 6 * (k + 1)
        pool = {"page_size": page_size, "num_pages": -(-longest // page_size) + slack}
        self.setup = {"k": k, "snapshots": True, **pool, **schedule}
        self.engine = self.resources.enter_context(self.lane.stepped(family=FAMILY, **self.setup))
        self.session = self.engine.open()
        drafter = self.lane.setup(family=FAMILY, **self.setup).drafter
        self.num_steps = 0 if drafter is None else drafter.num_steps

    @precondition(lambda self: len(self.asked) < MAX_REQUESTS)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        drawn = any_request(self.words, f"r{len(self.asked)}", self.trunk, mixed=True, timed=False)
        self.arrivals.append(data.draw(drawn, label="request"))
        self.asked.append(self.arrivals[-1])

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.aborts.append(data.draw(st.sampled_from(self.asked), label="who").request_id)

    @precondition(lambda self: self.asked and "preempt" in self.claimed)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self._act("preempt", f"{data.draw(st.sampled_from(self.asked), label='who').request_id}#0")

    @precondition(lambda self: "set_num_steps" in self.claimed)
    @rule(data=st.data())
    def set_num_steps(self, data: st.DataObject) -> None:
        self._act("set_num_steps", data.draw(st.integers(0, self.num_steps), label="k"))

    @rule(name=st.sampled_from(("reset_prefix_cache", "reload_target", "reload_drafter")))
    def refresh(self, name: ActionName) -> None:
        if name in self.claimed and self.resting != "sleep":
            self._act(name)

    @precondition(lambda self: self.resting is None)
    @rule(name=st.sampled_from(("pause", "sleep")))
    def rest(self, name: ActionName) -> None:
        if name in self.claimed:
            self._act(name)
            self.resting = name

    @precondition(lambda self: self.resting is not None)
    @rule()
    def go_on(self) -> None:
        self._act("resume" if self.resting == "pause" else "wake")
        self.resting = None

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def teardown(self) -> None:
        """Let everything end, and judge the whole."""
        with self.resources:
            if not self.asked or not self.setup:
                return
            if self.resting is not None:
                self.go_on()
            self._step()
            bound = self.steps + step_bound(self.asked)
            while self.session.unfinished and self.steps < bound:
                self._step()
            run = self.session.observed()
            self._blame(at_the_end(self.lane, run, baseline(self.lane, run, self._history(run)), FAMILY))

    def _act(self, name: ActionName, value: int | str | None = None) -> None:
        self.actions.append(Action(step=self.steps, name=name, value=value))

    def _step(self) -> None:
        try:
            for request in self.arrivals:
                self.session.add(request)
            for request_id in self.aborts:
                self.session.abort(request_id)
            for action in self.actions:
                self.session.act(action.name, action.value)
            self.session.step()
        except Exception as error:
            error.add_note(self._history(self.session.observed()).script())
            raise
        self.arrivals, self.aborts, self.actions = [], [], []
        self.steps += 1
        self._blame(after_step(self.lane, self.session.observed(), FAMILY, self.engine.fresh_state))

    def _history(self, run: Run) -> History:
        return History(self.lane.engine, self.lane.spec.name, FAMILY, self.setup, run.requests, run.actions)

    def _blame(self, violations: list[Violation]) -> None:
        if violations:
            history = self._history(self.session.observed())
            path = history.keep(self.folder)
            raise InvariantError(violations, f"python {path}\n{history.script()}")
