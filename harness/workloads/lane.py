"""What a suite gets from the `lane` fixture: an engine with one drafter, its checkpoints and their closed forms.

Suites say what runs; which engine and which drafter it is stays out of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal, cast

import hypothesis
import torch

from harness.contract import (
    Action,
    Capabilities,
    DType,
    Engine,
    EngineSetup,
    OnStep,
    Refused,
    Request,
    Run,
    SamplingParams,
    Script,
    SteppedEngine,
)
from harness.engines.isolated import EngineFailure
from harness.invariants.base import Violation, check
from harness.known_answer import Drafter, Target
from harness.record import write
from harness.workloads.known import Checkpoints, hidden_rows, known_family
from harness.workloads.lanes import DrafterLane, DraftMethod, factory_of
from harness.workloads.runs import RunCache
from harness.workloads.strategies import Batch

ATTEMPTS = 8
"""So many runs back a violation may lie."""

CONTEXT_LENGTH = 128
"""Default of a lane, in tokens: room for every workload, and pools that are quick to fill with poison."""


@dataclass(frozen=True)
class ClosedFormDrafts:
    """The script of a CUSTOM lane: what the family's drafter would draft."""

    family: str
    dtype: DType
    folder: str

    def __call__(self, _request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
        return known_family(self.family, self.dtype).drafters[self.folder].draft(tokens, k)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one `Lane.run` asked of a fresh engine."""

    setup: EngineSetup
    requests: tuple[Request, ...]
    warm: bool
    max_steps: int
    family: str


Keep = Callable[["Lane", Sequence[Attempt], str, frozenset[str]], str]
"""(lane, its last attempts, the newest last, what is wrong, the invariants that are broken, none for an engine that
failed) -> a line that tells where it was kept, or nothing."""


class Lane:
    """An engine and a drafter.

    Set-ups are keywords: `family`, `k`, `script`, `draft_sample_method`, and any field of `EngineSetup`. Runs on a
    fresh engine are remembered in `runs`, since many invariants judge the same one: a `Run` must not be written to.

    `record`: a folder into which every run is written, each into a folder of its own.

    `keep` is told of everything that fails, so that it can be seen again elsewhere.

    `seeds` says how many times, with other prompts, each scenario is to run.

    When an engine declines inside a property test, that example is dropped and the reason kept in `refusals`.
    """

    def __init__(
        self,
        engine: str,
        spec: DrafterLane,
        root: Path,
        runs: RunCache | None = None,
        seeds: int = 1,
        reproducer: Callable[[], str | None] = lambda: None,
        kernels: Literal["auto", "torch", "triton"] = "auto",
        record: Path | None = None,
        keep: Keep = lambda *_: "",
    ) -> None:
        self.engine, self.spec, self.seeds = engine, spec, seeds
        self.refusals: list[str] = []
        self._factory = factory_of(engine)
        self._checkpoints = Checkpoints(root)
        self._reproducer = reproducer
        self._kernels = kernels
        self._record = record
        self._keep = keep
        self._attempts: deque[Attempt] = deque(maxlen=ATTEMPTS)
        self._runs = runs or RunCache()
        self._capabilities: Capabilities | None = None
        self._claims: dict[DraftMethod, frozenset[str]] = {}
        self._door: str | None = None

    def __repr__(self) -> str:
        return f"<{self.engine} with {self.spec.name}>"

    @property
    def speculative(self) -> bool:
        return self.spec.speculative

    @property
    def capabilities(self) -> Capabilities:
        """What the engine claims with this drafter, or without one when it declines the drafter."""
        if self._capabilities is None:
            try:
                engine = self._factory.start(self.setup())
            except Refused:
                engine = self._factory.start(self.setup(speculative=False))
            self._capabilities = engine.capabilities
            engine.close()
        return self._capabilities

    def claims(self, draft_sample_method: DraftMethod) -> frozenset[str]:
        """The features that the engine claims when it drafts that way. Raises `Refused` when it does not."""
        if draft_sample_method not in self._claims:
            with self.start(draft_sample_method=draft_sample_method) as engine:
                self._claims[draft_sample_method] = engine.capabilities.features
        return self._claims[draft_sample_method]

    def knock(self) -> None:
        """Raises `Refused` when the engine declines this drafter in its plainest set-up."""
        if self._door is None:
            try:
                self._factory.start(self.setup()).close()
                self._door = ""
            except Refused as refusal:
                self._door = str(refusal) or "no reason given"
        if self._door:
            raise Refused(self._door)

    def target(self, family: str = "walk", dtype: DType = "float32") -> Target:
        """Closed form of the target that this lane's engine loads."""
        known = known_family(family, dtype)
        return known.drafters[self.spec.folder].target if self.spec.within_target else known.target

    def rows(self, family: str) -> Callable[[tuple[int, ...]], torch.Tensor]:
        """The true hidden rows of any token sequence."""
        return partial(hidden_rows, self.target(family))

    def layer_states(self, family: str) -> Callable[[tuple[int, ...]], torch.Tensor]:
        """The true residual streams of the layers that this lane's drafter keeps, of any token sequence."""
        target, layers = self.target(family), self.spec.options["aux_layer_ids"]
        return cache(lambda tokens: target.layer_states(tokens, layers))

    def drafter(self, family: str = "walk", dtype: DType = "float32") -> Drafter:
        """Closed form of the lane's drafter."""
        return known_family(family, dtype).drafter(self.spec.folder)

    def setup(
        self,
        *,
        family: str = "walk",
        k: int = 3,
        script: Script | None = None,
        speculative: bool = True,
        draft_sample_method: DraftMethod = "greedy",
        **changes: Any,
    ) -> EngineSetup:
        """The lane's set-up. `speculative=False` leaves the drafter out: same target, same everything."""
        dtype: DType = changes.get("dtype", "float32")
        directory = self._checkpoints.directory(family, dtype)
        if self.spec.scripted and script is None:
            script = ClosedFormDrafts(family, dtype, self.spec.folder)
        changes = {"context_length": CONTEXT_LENGTH, "kernels": self._kernels, **changes}
        drafter = self.spec.drafter(k, directory, script, draft_sample_method) if speculative else None
        return EngineSetup(target=directory / self.spec.target_folder(), drafter=drafter, **changes)

    @contextmanager
    def start(self, **setup: Any) -> Iterator[Engine]:
        """A fresh engine, closed at the end."""
        with self.start_setup(self.setup(**setup)) as engine:
            yield engine

    @contextmanager
    def start_setup(self, setup: EngineSetup) -> Iterator[Engine]:
        """A fresh engine of a set-up that keywords do not tell, such as one with a checkpoint of its own."""
        with self._refusing():
            engine = self._factory.start(setup)
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def stepped(self, **setup: Any) -> Iterator[SteppedEngine]:
        """The same of an engine that can be driven step by step; declined when this one cannot."""
        with self.start(**setup) as engine:
            if not hasattr(engine, "open"):
                raise Refused(f"engine={self.engine}: it runs batches to their end and cannot be stepped")
            yield cast(SteppedEngine, engine)

    def run(
        self,
        requests: Sequence[Request],
        *,
        warm: bool = False,
        actions: Sequence[Action] = (),
        on_step: OnStep | None = None,
        max_steps: int | None = None,
        **setup: Any,
    ) -> Run:
        """Run `requests` on a fresh engine, for `step_bound` steps at most; with `warm` they have run there before.
        Declined when the engine does not claim an action."""
        self.needs(*(action.name for action in actions))
        max_steps = max_steps or step_bound(requests)
        wanted = self.setup(**setup)
        key = (self.engine, tuple(requests), tuple(actions), warm, max_steps, wanted)
        # Snapshots hold the whole KV of every step: too big to keep.
        remembered = on_step is None and not wanted.snapshots
        known = self._runs.get(key) if remembered else None
        if known is not None:
            return known
        attempt = Attempt(wanted, tuple(requests), warm, max_steps, setup.get("family", "walk"))
        with self._keeping(attempt), self.start(**setup) as engine, self._refusing():
            if warm:
                engine.run(requests, max_steps=max_steps)
            run = engine.run(requests, actions=actions, on_step=on_step, max_steps=max_steps)
        if remembered:
            self._runs.put(key, run)
        if self._record is not None:
            self._record.mkdir(parents=True, exist_ok=True)
            drafter = "none" if run.setup.drafter is None else self.spec.name
            write(run, Path(mkdtemp(prefix=f"{drafter}-", dir=self._record)))
        return run

    def baseline(self, requests: Sequence[Request], **setup: Any) -> Run:
        """The same run without speculation."""
        return self.run(requests, **setup, speculative=False)

    def run_batch(self, batch: Batch, **setup: Any) -> Run:
        """Run a drawn batch, less what the engine does not claim to support."""
        fitted = self.fit(batch)
        return self.run(fitted.requests, **{"k": fitted.k, "warm": fitted.warm, **fitted.setup, **setup})

    def fit(self, batch: Batch) -> Batch:
        """The batch without the flags and set-up fields that the engine does not claim; a grey box takes any set-up."""
        claimed = self.capabilities.features
        open_ = self.capabilities.grey_box
        changes = tuple((name, value) for name, value in batch.changes if open_ or name in claimed)
        return replace(batch, requests=self.fit_requests(batch.requests), changes=changes)

    def fit_requests(self, requests: Iterable[Request]) -> tuple[Request, ...]:
        return tuple(fit_request(request, self.capabilities.features) for request in requests)

    def grey_box(self) -> None:
        """Decline the test when the engine shows nothing of its inside."""
        if not self.capabilities.grey_box:
            raise Refused(f"engine={self.engine}: a black box, it gives no step traces")

    def shows(self, observation: str) -> None:
        """Decline the test when the engine does not show that part of its inside."""
        if not self.capabilities.grey_box and observation not in self.capabilities.shows:
            raise Refused(f"engine={self.engine}: it does not show {observation} on the lane {self.spec.name}")

    def tells_acceptance(self) -> None:
        """Decline the test when the engine does not tell how many drafts were accepted."""
        if not self.capabilities.tells_acceptance:
            raise Refused(f"engine={self.engine}: it does not tell accept lengths on the lane {self.spec.name}")

    def needs(self, *features: str) -> None:
        """Decline the test when the engine does not claim a feature without which the test would show nothing."""
        for feature in features:
            if feature not in self.capabilities.features:
                raise Refused(f"{feature}: engine={self.engine} does not claim it on the lane {self.spec.name}")

    def check(self, violations: Iterable[Violation]) -> None:
        """Fail the test, with the command that reproduces it, unless there are no violations."""
        found = list(violations)
        told = [self._reproducer() or ""]
        if found:
            told.append(self._keep(self, self._attempts, found[0].render(), frozenset(v.invariant for v in found)))
        check(found, "\n".join(filter(None, told)) or None)

    @contextmanager
    def _keeping(self, attempt: Attempt) -> Iterator[None]:
        self._attempts.append(attempt)
        try:
            yield
        except EngineFailure as failure:
            told = self._keep(self, [attempt], str(failure).partition("\n")[0], frozenset())
            raise EngineFailure("\n".join(filter(None, (str(failure), told)))) from failure

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except Refused as refusal:
            self.refusals.append(str(refusal))
            if hypothesis.currently_in_test_context():
                hypothesis.reject()
            raise


def step_bound(requests: Sequence[Request]) -> int:
    """Steps within which any engine that makes progress is done, whatever its chunks, pool and drafts.

    As if every request ran alone, a token a step, and were preempted and prefilled again a few times.
    """
    alone = (r.sampling.n * (len(r.prompt_token_ids) + r.sampling.max_new_tokens + 4) for r in requests)
    return max((r.arrival_step for r in requests), default=0) + 4 * sum(alone) + 20


def fit_request(request: Request, claimed: frozenset[str]) -> Request:
    """The request with every flag back at its default that is not in `claimed`."""
    plain = SamplingParams()
    unclaimed = {
        field.name: getattr(plain, field.name)
        for field in fields(SamplingParams)
        if field.name not in claimed and field.name != "max_new_tokens"
    }
    if request.sampling.greedy and "greedy_n" not in claimed:
        unclaimed["n"] = 1
    timed = {"arrival_step", "abort_step"} & claimed
    return replace(
        request,
        sampling=replace(request.sampling, **unclaimed),
        return_hidden_states=request.return_hidden_states and "return_hidden_states" in claimed,
        arrival_step=request.arrival_step if timed else 0,
        abort_step=request.abort_step if "abort_step" in claimed else None,
        pooled_hidden=request.pooled_hidden if "pooled_hidden" in claimed else None,
        num_speculative_tokens=request.num_speculative_tokens if "num_speculative_tokens" in claimed else None,
    )
