"""Overlap scheduling with late results: whatever has not come in yet, requests come out as they would have.

On a CPU a launch has run when it returns: what is late here is what the host knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest

from harness.contract import Request, Run
from harness.engines.reference import ReferenceEngine
from harness.invariants import alias_1, check, count_1, equal_1, kv_1, logp_1
from harness.known_answer import Drafter
from harness.workloads.acceptance import earned
from harness.workloads.known import hidden_rows, known_family, vocabulary
from harness.workloads.lane import Lane, step_bound
from harness.workloads.scenarios import abort_storm, mixed_flags, plain, tiny_pool_preemption
from harness.workloads.strategies import Batch
from harness.workloads.vocabulary import Vocabulary
from reference_engine.engine import LLMEngine
from suites.conformance.arrange import MakeBatch, watched
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=2.1, stage="cpu", needs="cpu")

CENSUS = vocabulary("census")
DEPTH = 3


@dataclass(frozen=True)
class Jitter:
    """Results come in at random, none later than `DEPTH` launches on."""

    seed: int

    def __call__(self, launch: int) -> int:
        return Random(f"{self.seed}/{launch}").randint(0, DEPTH)


@dataclass(frozen=True)
class Bursts:
    """Nothing comes in for a while, then all at once."""

    def __call__(self, launch: int) -> int:
        return DEPTH if launch % 5 else 0


DELAYS = {"always late": lambda _launch: DEPTH, "bursts": Bursts(), "jitter": Jitter(3)}


def slots_change_hands(words: Vocabulary, seed: int = 0) -> Batch:
    """Two rows for ten requests, long ones and short ones in turn: a short one takes over what a long one left."""
    del seed
    lengths = [(20, 9), (1, 2), (13, 12), (2, 1), (9, 3), (1, 9), (24, 4), (3, 2), (1, 1), (6, 8)]
    base = tiny_pool_preemption(words).requests[0]
    requests = tuple(
        Request(
            request_id=f"q{place}",
            prompt_token_ids=words.prompt(length, place),
            sampling=replace(base.sampling, max_new_tokens=cap),
        )
        for place, (length, cap) in enumerate(lengths)
    )
    return Batch(requests, k=3, changes=(("max_running", 2), ("page_size", 4)))


MAKES = (slots_change_hands, tiny_pool_preemption, abort_storm, mixed_flags)


def late_run(lane: Lane, batch: Batch, delay: str) -> Run:
    setup = lane.setup(family="census", k=batch.k, **{**batch.setup, "overlap": True})
    engine = ReferenceEngine(setup, overlap_depth=DEPTH, lateness=DELAYS[delay])
    return engine.run(batch.requests, max_steps=step_bound(batch.requests))


def bare(run: Run, drafter: Drafter) -> None:
    """Accept lengths of completions that no abort cut."""
    for done in run.completions:
        if run.request(done.request_id).sampling.greedy and done.finish_reason != "abort":
            assert done.accept_lens == earned(done, drafter, 3, run.capabilities), done.request_id


@pytest.mark.drafters("STANDALONE", "EAGLE", "MTP", "NGRAM")
@pytest.mark.parametrize("delay", tiered(DELAYS, "jitter"))
@pytest.mark.parametrize("make", tiered(MAKES, slots_change_hands, abort_storm))
def test_late_results(lane: Lane, make: MakeBatch, delay: str) -> None:
    batch = lane.fit(watched(make(CENSUS)))
    run = late_run(lane, batch, delay)
    assert run.idle, "requests are left over"
    target = known_family("census").drafters.get(lane.spec.folder, known_family("census")).target
    found = kv_1(run) + count_1(run) + alias_1(run, lambda tokens: hidden_rows(target, tokens))
    found += logp_1(run, target.logprobs) + equal_1(run, lane.run_batch(batch, family="census", speculative=False))
    check(found)
    if make is not mixed_flags:
        bare(run, lane.drafter("census"))


@pytest.mark.drafters("none", "EAGLE", "EAGLE-tree")
@pytest.mark.parametrize("page_size", [1, 4])
def test_late_results_at_the_end_of_the_context(lane: Lane, page_size: int) -> None:
    """Launches that were on their way when a request ended run past its end, and into nobody else's memory."""
    requests = plain(CENSUS, (9, 7, 5, 3), (15, 17, 19, 21))
    batch = Batch(requests, k=3, changes=(("context_length", 24), ("max_running", 4), ("page_size", page_size)))
    run = late_run(lane, batch, "always late")
    check(kv_1(run) + equal_1(run, lane.run_batch(batch, family="census", speculative=False)))


@pytest.mark.drafters("EAGLE")
def test_results_in_the_wrong_order_are_seen(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    process = LLMEngine._process

    def newest_first(self: LLMEngine, result: object) -> None:
        self._in_flight.appendleft(result)  # type: ignore[arg-type]
        process(self, self._in_flight.pop())

    monkeypatch.setattr(LLMEngine, "_process", newest_first)
    with pytest.raises(AssertionError):
        test_late_results(lane, slots_change_hands, "always late")


@pytest.mark.drafters("none")
@pytest.mark.parametrize("cap", [1, 2, 7])
def test_nothing_is_launched_once_the_cap_is_sure(lane: Lane, cap: int) -> None:
    """Every launch in flight adds a token: the last of them is known before its result is."""
    run = late_run(lane, Batch(plain(CENSUS, (5,), (cap,)), k=0), "jitter")
    assert len(run.completions[0].token_ids) == cap
    assert sum(step.target_forwards for step in run.steps if step.kind == "decode") == cap - 1
