"""SCHED: requests do not disturb each other, all of them end, and mixed flags do not leak."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from harness.contract import Delta, Request, Run, StepTrace
from harness.invariants.base import Key, Misuse, Violation, blame, invariant
from harness.invariants.compare import Terms, compare, paired, repeatable
from harness.invariants.wellformed import sound_completions, sound_deltas, wanted_keys


@invariant(
    "SCHED-1",
    statement="aborting, finishing, preempting or admitting one request changes no other request's result",
    needs={"completion", "baseline"},
)
def sched_1(run: Run, baseline: Run, disturbed: Collection[str] = (), accept_lens: bool = False) -> list[Violation]:
    """`run` and `baseline` hold the same requests, save those that only one has and those that one aborts.

    Requests in `disturbed` are not compared. What an aborted request did get must be a prefix of its full output; a
    preempted request must come out whole.
    """
    pairs, out = paired("SCHED-1", run, baseline, "undisturbed run", seeded=True, all_of_run=False)
    terms = Terms.of(run, "undisturbed run", accept_lens=accept_lens)
    for pair in pairs:
        if pair.key[0] in disturbed:
            continue
        out += compare("SCHED-1", pair, terms)
    return out


@invariant(
    "SCHED-2",
    statement="every admitted request ends within a step bound; the engine idles when none is left",
    needs={"completion"},
)
def sched_2(run: Run, step_bound: int) -> list[Violation]:
    """`step_bound` counts steps from the arrival of a request (or its abort, when that is earlier news) to its end.

    Where the engine gives no deltas, the whole run must fit into the last arrival plus the bound.
    """
    found, out = sound_completions("SCHED-2", run)
    if not run.idle:
        missing = sorted({key[0] for _, key in wanted_keys(run) if key not in found})
        message = "the run hit its step limit with requests unfinished: a hang or a livelock"
        out.append(Violation(invariant="SCHED-2", message=message, expected="idle", got=missing))
    deltas, flaws = sound_deltas("SCHED-2", run)
    out += flaws
    for request, key in wanted_keys(run):
        ends = [step.step for step, delta in deltas.get(key, []) if delta.finished]
        if ends:
            out += _late(request, key, ends[0], step_bound)
    if run.steps and not deltas:
        last = max(request.arrival_step for request in run.requests)
        steps = max(step.step for step in run.steps) - last
        if steps > step_bound:
            message = "the run took more steps than the bound after the last arrival"
            out.append(Violation(invariant="SCHED-2", message=message, expected=step_bound, got=steps))
    return out + _idles(run) + _waits(run, deltas)


@invariant("SCHED-2", needs={"trace", "completion"})
def sched_2_first(run: Run, step_bound: int) -> list[Violation]:
    """The first token of every request comes within `step_bound` steps of its arrival, whatever runs already."""
    deltas, out = sound_deltas("SCHED-2", run)
    for request, key in wanted_keys(run):
        first = next((step.step for step, delta in deltas.get(key, []) if delta.token_ids), None)
        took = None if first is None else first - request.arrival_step
        if took is None or took > step_bound:
            message = "the first token of a request came too late: it waits for those that run already"
            out.append(blame("SCHED-2", key, message, step=first, expected=f"at most {step_bound}", got=took))
    return out


def _late(request: Request, key: Key, end: int, step_bound: int) -> list[Violation]:
    took = end - request.arrival_step
    out = []
    if took > step_bound:
        message = "a request took more steps than the bound"
        out.append(blame("SCHED-2", key, message, step=end, expected=f"at most {step_bound}", got=took))
    if request.abort_step is not None and end - request.abort_step > 2:
        message = "an aborted request went on (one step may be in flight)"
        out.append(blame("SCHED-2", key, message, step=end, expected=request.abort_step, got=end))
    return out


def _idles(run: Run) -> list[Violation]:
    """After the last finish at most one more step computes (overlap scheduling has it in flight already)."""
    ends = [place for place, step in enumerate(run.steps) if any(delta.finished for delta in step.deltas)]
    if not ends or not run.idle:
        return []
    busy = [step.step for step in run.steps[ends[-1] + 1 :] if step.target_forwards > 0]
    if len(busy) <= 1:
        return []
    message = "the engine computes on, though no request is left"
    return [Violation(invariant="SCHED-2", step=busy[1], message=message, expected="idle", got=f"{len(busy)} steps")]


def _waits(run: Run, deltas: Mapping[Key, Sequence[tuple[StepTrace, Delta]]]) -> list[Violation]:
    """No step is idle while a request waits. Under overlap scheduling a step may only take results in; so may one in
    which somebody paused the engine."""
    if run.setup.overlap or run.actions or not deltas:
        return []
    idle = [step.step for step in run.steps if step.kind == "idle"]
    out = []
    for request, key in wanted_keys(run):
        ends = [step.step for step, delta in deltas.get(key, []) if delta.finished]
        lost = [step for step in idle if ends and request.arrival_step <= step < ends[0]]
        if lost and request.abort_step is None:
            message = "a step computes nothing, though a request waits for it"
            out.append(blame("SCHED-2", key, message, step=lost[0], expected="a launch", got="an idle step"))
    return out


@invariant(
    "SCHED-3",
    statement="requests with different flags (hidden states, logprobs, penalties, grammar, seeds, no drafts) in one "
    "batch equal their solo runs",
    needs={"completion", "baseline"},
)
def sched_3(run: Run, solos: Mapping[str, Run], accept_lens: bool = False) -> list[Violation]:
    """`solos` gives, by request id, the run in which that request was alone (for every greedy or seeded request).

    Optional parts (logprobs, hidden states) must be there in both or in neither: a flag must not leak to a neighbour.
    """
    _, out = sound_completions("SCHED-3", run)
    deltas, flaws = sound_deltas("SCHED-3", run)
    out += flaws
    terms = Terms.of(run, "solo run", accept_lens=accept_lens, presence=True)
    for request in run.requests:
        if not repeatable(request, seeded=True):
            continue
        if request.request_id not in solos:
            raise Misuse(
                f"solos has no run for request {request.request_id!r}; run every greedy or seeded request alone"
            )
        solo = solos[request.request_id]
        pairs, flaws = paired("SCHED-3", run, solo, "solo run", seeded=True, all_of_run=False)
        alone, more_flaws = sound_deltas("SCHED-3", solo)
        out += [flaw for flaw in (*flaws, *more_flaws) if flaw not in out]
        for pair in pairs:
            if pair.request.request_id == request.request_id:
                out += compare("SCHED-3", pair, terms)
                out += _leaks(pair.key, deltas.get(pair.key, []), alone.get(pair.key, []))
    return out


def _leaks(
    key: Key, parts: Sequence[tuple[StepTrace, Delta]], alone: Sequence[tuple[StepTrace, Delta]]
) -> list[Violation]:
    """What steps bring beside tokens must be there in both or in neither: a completion may have hidden it since."""
    if not parts or not alone:
        return []
    out = []
    for name in ("logprobs", "prefill_hidden", "decode_hidden"):
        got, right = (
            any(value is not None and len(value) > 0 for value in (getattr(delta, name) for _, delta in side))
            for side in (parts, alone)
        )
        if got != right:
            message = f"steps deliver {name} in only one of the run and the solo run"
            out.append(blame("SCHED-3", key, message, expected=right, got=got))
    return out
