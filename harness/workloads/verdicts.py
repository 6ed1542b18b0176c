"""Every invariant that a run of a lane can be held against, in one call: for workloads that nobody scripted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.contract import Completion, Delta, HiddenStates, Request, Run, StateSnapshot, Usage
from harness.invariants import Violation, accept_1, alias_1, equal_1, judge, logp_1, offers, sched_2, state_1
from harness.workloads.acceptance import earned, is_bare
from harness.workloads.lane import Lane, step_bound

Fresh = Callable[[tuple[int, ...]], StateSnapshot]


def as_if_aborted(run: Run) -> Run:
    """A run under way as if all that is unfinished had been aborted after its last step."""
    deltas: dict[tuple[str, int], list[Delta]] = {}
    for step in run.steps:
        for delta in step.deltas:
            deltas.setdefault((delta.request_id, delta.index), []).append(delta)
    # Before the first verify step all lists are known to be empty; later only the trace knows them.
    lens = None if run.setup.drafter is None or any(step.verify is not None for step in run.steps) else ()
    requests, completions = [], []
    for request in run.requests:
        mine = [completion for completion in run.completions if completion.request_id == request.request_id]
        if len(mine) < request.sampling.n:
            # Prompt logprobs come with the end of a request.
            sampling = replace(request.sampling, prompt_logprobs=None)
            request = replace(request, sampling=sampling, abort_step=len(run.steps))
            mine = [replace(completion, prompt_logprobs=None) for completion in mine]
            open_ = set(range(sampling.n)) - {completion.index for completion in mine}
            mine += [_cut(request, index, deltas.get((request.request_id, index), []), lens) for index in open_]
        requests.append(request)
        completions += mine
    return replace(run, requests=tuple(requests), completions=tuple(completions))


def _cut(request: Request, index: int, deltas: Sequence[Delta], lens: tuple[int, ...] | None) -> Completion:
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    prefill = next((delta.prefill_hidden for delta in deltas if delta.prefill_hidden is not None), None)
    rows = tuple(row for delta in deltas for row in delta.decode_hidden)
    return Completion(
        request_id=request.request_id,
        index=index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tokens,
        finish_reason="abort",
        usage=Usage(len(request.prompt_token_ids), len(tokens)),
        logprobs=None
        if request.sampling.logprobs is None
        else tuple(row for delta in deltas for row in delta.logprobs),
        hidden_states=None if prefill is None else HiddenStates(prefill, rows),
        accept_lens=lens,
        draft_lens=lens,
    )


def after_step(lane: Lane, run: Run, family: str, fresh: Fresh) -> list[Violation]:
    """Of a run under way: all that one run is enough for, its rows and logprobs, and the state that its last step
    left."""
    cut = as_if_aborted(run)
    last = replace(cut, steps=cut.steps[-1:])
    found = judge(cut) + _against_closed_forms(lane, cut, family)
    return found + (state_1(last, fresh) if "snapshots" in offers(last) else [])


def at_the_end(lane: Lane, run: Run, baseline: Run, family: str) -> list[Violation]:
    """Of a whole run: the same, and its end, its tokens and its acceptance. `baseline` has no speculation."""
    found = judge(run) + _against_closed_forms(lane, run, family)
    found += sched_2(run, step_bound(run.requests) + len(run.actions))
    if any(request.sampling.greedy for request in run.requests):
        found += equal_1(run, baseline)
    return found + (_acceptance(lane, run, family) if _told(lane, family) else [])


def of_a_recording(
    run: Run, baseline: Run | None = None, lane: Lane | None = None, family: str = ""
) -> list[Violation]:
    """Of a run that somebody recorded: what one run is enough for, its tokens where there is a baseline to hold them
    against, and the closed forms where it is known what ran: a known-answer family and a lane's drafter."""
    found = judge(run)
    if baseline is not None:
        found += equal_1(run, baseline)
    if lane is not None:
        found += _against_closed_forms(lane, run, family)
        found += _acceptance(lane, run, family) if _told(lane, family) else []
    return found


def _told(lane: Lane, family: str) -> bool:
    """Whether acceptance has a closed form. Which nodes a tree keeps is told by the probabilities of its drafter; only
    those of a walk make it its best chain."""
    return lane.speculative and (lane.spec.topk == 1 or family.startswith("walk"))


def _against_closed_forms(lane: Lane, run: Run, family: str) -> list[Violation]:
    offered, found = offers(run), []
    if "hidden" in offered:
        found += alias_1(run, lane.rows(family))
    if "logprobs" in offered:
        found += logp_1(run, lane.target(family).logprobs)
    return found


def _acceptance(lane: Lane, run: Run, family: str) -> list[Violation]:
    """Accept lengths of the bare requests, each step given how much it drafted: of those that tell both."""
    if run.setup.drafter is None:
        return []
    bare = {request.request_id for request in run.requests if is_bare(request, run.capabilities)}
    bare -= {done.request_id for done in run.completions if done.draft_lens is None}
    judged = replace(
        run,
        requests=tuple(request for request in run.requests if request.request_id in bare),
        completions=tuple(done for done in run.completions if done.request_id in bare),
        steps=(),
    )
    if not bare or "accept_lens" not in offers(judged):
        return []
    drafter, k, claims = lane.drafter(family), run.setup.drafter.num_steps, run.capabilities
    right = {f"{done.request_id}#{done.index}": earned(done, drafter, k, claims) for done in judged.completions}
    return accept_1(judged, right)
