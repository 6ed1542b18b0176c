"""The reference engine under the contract: a grey box that shows every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from harness import contract
from harness.contract import (
    Action,
    ActionName,
    Capabilities,
    Completion,
    Delta,
    EngineSetup,
    HiddenStates,
    LogprobRow,
    OnStep,
    PageLedger,
    ProposeTrace,
    Refused,
    Request,
    Run,
    SpecCounters,
    StateSnapshot,
    StepTrace,
    TensorFacts,
    Usage,
    VerifyTrace,
    ask,
)
from reference_engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, SpecConfig
from reference_engine.batch import ProposeRecord
from reference_engine.drafters import DRAFTERS
from reference_engine.engine import ProcessedResult, StepOutput
from reference_engine.output import SpecStats
from reference_engine.request import Logprob
from reference_engine.snapshot import Snapshot, running_snapshots

_FEATURES = frozenset(field.name for field in fields(SamplingParams)) | {
    "greedy_n",
    "return_hidden_states",
    "pooled_hidden",
    "abort_step",
    "num_speculative_tokens",
}
_ACTIONS = frozenset(
    {"pause", "resume", "preempt", "reset_prefix_cache", "reload_target", "reload_drafter", "sleep", "wake"}
    | {"set_num_steps"}
)
"""Actions that `LLMEngine` has a method for, of the same name."""


class ReferenceFactory:
    name = "reference"

    def start(self, setup: EngineSetup) -> ReferenceEngine:
        return ReferenceEngine(setup)


class ReferenceEngine:
    """Raises `Refused` wherever the engine itself raises ValueError, with the same words."""

    def __init__(self, setup: EngineSetup, **options: Any) -> None:
        """`options`: fields of `EngineConfig` that no other engine has."""
        self.setup = setup
        try:
            self.engine = LLMEngine(replace(_config(setup), **options))
        except ValueError as error:
            raise Refused(str(error)) from error
        self._actions = _ACTIONS - self._pointless()

    def _pointless(self) -> set[str]:
        """Actions without anything to act upon."""
        if self.setup.drafter is None:
            return {"reload_drafter", "set_num_steps"}
        return set() if self.engine.has_drafter_weights else {"reload_drafter"}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="reference",
            version="0.1.0",
            drafters=frozenset(DRAFTERS),
            features=_FEATURES | self._actions,
            ignore_eos="emit",
            grey_box=True,
            seeds_of_samples="consecutive",
            drafts_within_context=True,
            dead_end="ends",
        )

    def run(
        self,
        requests: Sequence[Request],
        *,
        actions: Sequence[Action] = (),
        on_step: OnStep | None = None,
        max_steps: int = 10_000,
    ) -> Run:
        seen: set[str] = set()
        for request in requests:
            if request.request_id in seen:
                raise Refused(f"request_id={request.request_id!r}: is there twice; ids must be unique")
            seen.add(request.request_id)
            self.refuse(request)
        for action in actions:
            self.refuse_action(action.name)
        session = self.open()
        last = max((request.arrival_step for request in requests), default=-1)
        step = 0
        while (step <= last or session.unfinished) and step < max_steps:
            ask(session, step, requests, actions)
            trace = session.step()
            if on_step is not None:
                on_step(trace)
            step += 1
        observed = session.observed()
        idle = observed.idle and step > last
        return replace(observed, requests=tuple(requests), actions=tuple(actions), idle=idle)

    def open(self) -> ReferenceSession:
        return ReferenceSession(self)

    def fresh_state(self, token_ids: Sequence[int]) -> StateSnapshot:
        """A new engine prefills all but the last token at once, knowing the last, and is read out."""
        whole = len(token_ids) + 1
        config = self.engine.config
        # Room for the request's tokens, its one step and nothing else; no chunks, no cache, no padding.
        alone = replace(
            config,
            # Under overlap scheduling a request may have run past its context already.
            context_length=max(config.context_length, whole),
            num_pages=0,
            max_running=1,
            chunk_size=whole,
            prefix_cache=False,
            overlap=False,
            batch_buckets=(),
            poison=True,
            trace=False,
            snapshots=True,
            compile=False,
            cuda_graphs=False,
        )
        fresh = LLMEngine(alone)
        fresh.add_request("fresh", token_ids[:-1], SamplingParams(max_new_tokens=2), committed_token_ids=token_ids[-1:])
        fresh.step()
        (snapshot,) = running_snapshots(fresh)
        return _state(snapshot)

    def close(self) -> None:
        del self.engine

    def refuse_action(self, name: ActionName) -> None:
        if name not in self._actions:
            raise Refused(f"{name}: there is nothing to do it to in this set-up; leave it out")

    def refuse(self, request: Request) -> None:
        """Raises `Refused` when the engine could not run the request."""
        try:
            self.engine.check(request.request_id, request.prompt_token_ids, _sampling(request.sampling))
        except ValueError as error:
            raise Refused(str(error)) from error


class ReferenceSession:
    """See `harness.contract.Session`."""

    def __init__(self, owner: ReferenceEngine) -> None:
        self._owner, self._engine = owner, owner.engine
        self._requests: dict[str, Request] = {}
        self._actions: list[Action] = []
        self._steps: list[StepTrace] = []
        self._recorder = _Recorder(self._engine, self._requests)
        self._before = _counters(self._engine.processor.stats)

    @property
    def unfinished(self) -> bool:
        return self._engine.has_unfinished

    def add(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise Refused(f"request_id={request.request_id!r}: is there twice; ids must be unique")
        self._owner.refuse(request)
        self._requests[request.request_id] = replace(request, arrival_step=len(self._steps), abort_step=None)
        self._engine.add_request(
            request.request_id,
            request.prompt_token_ids,
            _sampling(request.sampling),
            return_hidden_states=request.return_hidden_states,
            pooled_hidden=request.pooled_hidden,
            num_speculative_tokens=request.num_speculative_tokens,
        )

    def abort(self, request_id: str) -> None:
        if any(state.request_id == request_id and not state.finished for state in self._engine.requests()):
            self._requests[request_id] = replace(self._requests[request_id], abort_step=len(self._steps))
        self._engine.abort(request_id)

    def act(self, name: ActionName, value: int | str | None = None) -> None:
        self._owner.refuse_action(name)
        self._actions.append(Action(step=len(self._steps), name=name, value=value))
        method = getattr(self._engine, name)
        method() if value is None else method(value)

    def step(self) -> StepTrace:
        trace = self._recorder.record(len(self._steps), self._engine.step(), self._owner.setup.snapshots)
        self._steps.append(trace)
        return trace

    def observed(self) -> Run:
        counters = _difference(_counters(self._engine.processor.stats), self._before)
        return Run(
            setup=self._owner.setup,
            capabilities=self._owner.capabilities,
            requests=tuple(self._requests.values()),
            completions=self._recorder.completions(),
            steps=tuple(self._steps),
            counters=counters if self._owner.setup.drafter else None,
            actions=tuple(self._actions),
            idle=not self.unfinished,
        )


def _config(setup: EngineSetup) -> EngineConfig:
    drafter = setup.drafter
    spec = None
    if drafter is not None:
        spec = SpecConfig(**{field.name: getattr(drafter, field.name) for field in fields(SpecConfig)})
    same = {
        field.name: getattr(setup, field.name)
        for field in fields(setup)
        if field.name not in ("target", "drafter") and (field.name, getattr(setup, field.name)) != ("page_size", None)
    }
    return EngineConfig(model=setup.target, spec=spec, trace=True, **same)


def _sampling(params: contract.SamplingParams) -> SamplingParams:
    return SamplingParams(**{field.name: getattr(params, field.name) for field in fields(SamplingParams)})


class _Recorder:
    """Builds traces step by step and completions at the end."""

    def __init__(self, engine: LLMEngine, requests: Mapping[str, Request]) -> None:
        self.engine = engine
        self.requests = requests
        self.deltas: dict[tuple[str, int], list[Delta]] = {}
        self.finals: dict[tuple[str, int], RequestOutput] = {}

    def record(self, step: int, output: StepOutput, snapshots: bool) -> StepTrace:
        deltas = tuple(self._delta(delivered) for delivered in output.outputs)
        launch = output.launch
        verify = [
            p for p in output.processed if p.result.batch.kind == "decode" and self.engine.config.spec is not None
        ]
        return StepTrace(
            step=step,
            kind=output.kind,
            deltas=deltas,
            propose=_propose(launch.propose) if launch is not None and launch.propose is not None else None,
            verify=_verify(verify[-1]) if verify else None,
            embedded=launch.embedded if launch is not None else None,
            pages=_ledger(self.engine),
            committed={request.owner: request.num_tokens for request in self.engine.requests()},
            snapshots=tuple(_state(s) for s in running_snapshots(self.engine)) if snapshots else (),
            preempted=tuple(output.preempted),
            aux_hidden_rows=launch.aux_rows if launch is not None else None,
            target_forwards=launch.target_forwards if launch is not None else 0,
            draft_forwards=launch.draft_forwards if launch is not None else 0,
        )

    def _delta(self, output: RequestOutput) -> Delta:
        delta = Delta(
            request_id=output.request_id,
            index=output.index,
            token_ids=output.token_ids,
            prefill_hidden=output.prefill_hidden,
            decode_hidden=output.decode_hidden,
            logprobs=tuple(_row(row) for row in output.logprobs),
            finished=output.finish_reason is not None,
        )
        key = (output.request_id, output.index)
        self.deltas.setdefault(key, []).append(delta)
        if output.finish_reason is not None:
            self.finals[key] = output
        return delta

    def completions(self) -> tuple[Completion, ...]:
        order = {request_id: place for place, request_id in enumerate(self.requests)}
        keys = sorted(self.finals, key=lambda key: (order[key[0]], key[1]))
        return tuple(self._completion(key) for key in keys)

    def _completion(self, key: tuple[str, int]) -> Completion:
        request, final, deltas = self.requests[key[0]], self.finals[key], self.deltas[key]
        tokens = tuple(token for delta in deltas for token in delta.token_ids)
        prefill = next((d.prefill_hidden for d in deltas if d.prefill_hidden is not None), None)
        hidden = None
        if prefill is not None:
            hidden = HiddenStates(prefill, tuple(row for delta in deltas for row in delta.decode_hidden))
        prompt_logprobs = None
        if final.prompt_logprobs is not None:
            prompt_logprobs = tuple(None if row is None else _row(row) for row in final.prompt_logprobs)
        assert final.finish_reason is not None
        return Completion(
            request_id=final.request_id,
            index=final.index,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tokens,
            finish_reason=final.finish_reason,
            usage=Usage(len(request.prompt_token_ids), final.num_output_tokens, final.num_cached_tokens),
            text=final.text,
            logprobs=None
            if request.sampling.logprobs is None
            else tuple(row for delta in deltas for row in delta.logprobs),
            prompt_logprobs=prompt_logprobs,
            hidden_states=hidden,
            pooled_hidden=final.pooled_hidden,
            accept_lens=final.accept_lens if self.engine.config.spec is not None else None,
            draft_lens=final.draft_lens if self.engine.config.spec is not None else None,
            layer_states=final.layer_states,
        )


def _row(row: Logprob) -> LogprobRow:
    return LogprobRow(row.token_id, row.logprob, row.rank, row.top)


def _propose(record: ProposeRecord) -> ProposeTrace:
    return ProposeTrace(
        request_ids=record.request_ids,
        k=record.k,
        sampled_width=record.sampled_width,
        discarded=record.discarded,
        token_ids=record.token_ids,
        facts=TensorFacts.of(record.returned),
        sampled=TensorFacts.of(record.sampled),
    )


def _verify(processed: ProcessedResult) -> VerifyTrace:
    result = processed.result
    size = len(result.batch.requests)
    assert result.draft_tokens is not None
    return VerifyTrace(
        request_ids=tuple(request.owner for request in result.batch.requests),
        num_draft_tokens=result.stride,
        draft_token_ids=result.draft_tokens[:size],
        accept_lens=tuple(result.counts[:size].tolist()),
        emitted=result.emitted[:size],
        discarded=processed.discarded,
        hidden=TensorFacts.of(result.hidden),
        draft_parents=None if result.draft_parents is None else result.draft_parents[:size],
    )


def _ledger(engine: LLMEngine) -> PageLedger:
    """The engine counts its pages from 1 (0 is the null page, which nobody owns), a ledger from 0."""

    def from_0(pages: Iterable[int]) -> tuple[int, ...]:
        return tuple(page - 1 for page in pages)

    allocator = engine.allocator
    return PageLedger(
        total=allocator.num_pages,
        free=from_0(allocator.free_pages()),
        held={request.owner: from_0(request.pages) for request in engine.scheduler.running},
        cached=from_0(allocator.cached_pages()),
        shared=from_0(allocator.shared_pages()),
    )


def _state(snapshot: Snapshot) -> StateSnapshot:
    return StateSnapshot(
        owner=snapshot.owner,
        token_ids=snapshot.token_ids,
        target_kv=snapshot.target_kv,
        draft_kv=snapshot.draft_kv,
        draft_input_ids=snapshot.draft_input_ids,
        draft_features=snapshot.draft_features,
        recurrent_state=snapshot.recurrent_state,
    )


def _counters(stats: SpecStats) -> SpecCounters:
    return SpecCounters(
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        accepted_per_position=tuple(stats.accepted_per_position),
    )


def _difference(after: SpecCounters, before: SpecCounters) -> SpecCounters:
    pairs = zip(after.accepted_per_position, before.accepted_per_position, strict=True)
    return SpecCounters(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        accepted_per_position=tuple(a - b for a, b in pairs),
    )
