"""A bounded soak: the same traffic again and again on one engine, among cancels and retries, watched for drift."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from harness.contract import Engine, Request, Run, SamplingParams
from harness.invariants import Violation, accept_1, count_1, judge
from harness.workloads.acceptance import deserved
from harness.workloads.lane import Lane, step_bound
from harness.workloads.vocabulary import Vocabulary

PROMPTS = 24
ROUND = 100
"""Requests of a round; a tenth of them is cancelled and asked again later."""

DRIFT = 0.02
"""How far the hit rate of a late round may lie below that of the early ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a round looked like. `acceptance` is accepted over verified drafts, `hits` cached over all prompt tokens,
    `free_pages` at its end (cached ones included), `resident` memory in MiB, `seconds` of CPU a step."""

    steps: int
    requests: int
    acceptance: float | None
    hits: float
    free_pages: int | None
    resident: float
    seconds: float


def traffic(vocabulary: Vocabulary, seed: int) -> tuple[Request, ...]:
    """A round: prompts with shared beginnings in random order, arrivals spread out, some cancelled and retried."""
    rng = Random(seed)
    trunk = vocabulary.prompt(24, 1)
    prompts = [trunk[: 4 + place] + vocabulary.prompt(1 + place % 5, place) for place in range(PROMPTS)]
    requests: list[Request] = []
    for number in range(ROUND):
        place = rng.randrange(PROMPTS)
        sampling = SamplingParams(max_new_tokens=4 + place % 9)
        arrival = number // 2
        cancelled = rng.random() < 0.1
        asked = Request(
            request_id=f"r{number}",
            prompt_token_ids=prompts[place],
            sampling=sampling,
            arrival_step=arrival,
            abort_step=arrival + rng.randrange(4) if cancelled else None,
        )
        requests.append(asked)
        if cancelled:
            requests.append(replace(asked, request_id=f"r{number}-again", arrival_step=arrival + 5, abort_step=None))
    return tuple(requests)


def soak(lane: Lane, engine: Engine, vocabulary: Vocabulary, steps: int) -> Iterator[tuple[Round, list[Violation]]]:
    """Rounds until `steps` steps (or, of an engine that shows none, tokens) are over, with what is wrong in each."""
    done = 0
    earlier: list[Round] = []
    while done < steps:
        # A few kinds of traffic take turns, so that a round meets what another one left.
        requests = lane.fit_requests(traffic(vocabulary, len(earlier) % 3))
        started = time.process_time()
        run = engine.run(requests, max_steps=step_bound(requests))
        count = len(run.steps) or sum(len(completion.token_ids) for completion in run.completions)
        now = _round(run, count, time.process_time() - started)
        earlier.append(now)
        done += count
        yield now, _faults(lane, run, vocabulary, earlier)


def _faults(lane: Lane, run: Run, vocabulary: Vocabulary, rounds: list[Round]) -> list[Violation]:
    found = judge(run) if run.steps else count_1(run)
    if lane.speculative:
        found += accept_1(run, deserved(run, lane.drafter(vocabulary.family)))
    first, last = rounds[0], rounds[-1]
    if last.free_pages != first.free_pages:
        message = f"free pages drift: round {len(rounds)} ends with another number than the first"
        found.append(Violation(invariant="KV-1", message=message, expected=first.free_pages, got=last.free_pages))
    # The first turn of each kind warms the cache.
    settled = [earlier.hits for earlier in rounds[3:9]]
    if len(rounds) > 9 and last.hits < min(settled) - DRIFT:
        message = f"the hit rate drifts: it has fallen in round {len(rounds)}"
        found.append(Violation(invariant="ACCEPT-2", message=message, expected=min(settled), got=last.hits))
    return found


def _round(run: Run, steps: int, seconds: float) -> Round:
    drafted = sum(sum(completion.draft_lens or ()) for completion in run.completions)
    accepted = sum(
        sum(completion.accept_lens or ()) - len(completion.accept_lens or ()) for completion in run.completions
    )
    usages = [completion.usage for completion in run.completions]
    ledger = run.steps[-1].pages if run.steps else None
    return Round(
        steps=steps,
        requests=len(run.requests),
        acceptance=accepted / drafted if drafted else None,
        hits=sum(usage.cached_tokens for usage in usages) / max(1, sum(usage.prompt_tokens for usage in usages)),
        free_pages=len(ledger.free) + len(ledger.cached) if ledger is not None else None,
        resident=resident_mib(),
        seconds=seconds / max(1, steps),
    )


def resident_mib() -> float:
    """Memory of this process, where the system tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return float("nan")
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
