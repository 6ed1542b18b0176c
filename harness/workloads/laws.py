"""Sampled requests of every kind, their closed-form law, and how the false-alarm rate of a whole run is shared out.

To add a processor: a line in `processors`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from harness.contract import Capabilities, Engine, Refused, Request, Run, SamplingParams
from harness.known_answer import Target
from harness.known_answer.markov import MarkovTarget
from harness.oracles.sampling import History, next_token_law
from harness.oracles.statistics import share_alpha
from harness.workloads.lane import fit_request
from harness.workloads.lanes import LANES, DraftMethod
from harness.workloads.strategies import Batch

Floats = NDArray[np.float64]
Kinds = Mapping[str, Mapping[str, Any]]
"""Names of processors and the sampling fields that ask for them, `temperature` left out where it is 1."""

RUN_ALPHA = 1e-9
"""Probability that a run of the whole suite, whatever its tier, fails a correct engine by chance."""
INDEPENDENCE_SHARE = 0.1
"""The part of `RUN_ALPHA` that LAW-3 may spend on telling copies apart; LAW-2 has the rest."""
DRAFT_METHODS: tuple[DraftMethod, ...] = get_args(DraftMethod)
NUM_STEPS = 2
"""Drafts per step: a first, a middle and a bonus place in the block."""
COIN_IDS = (0, 15, 12)
"""The three tokens of the family "coin"."""
SHORT = 6
"""Tokens of a request whose law depends on what it has said: later, all has been said."""
LONG = 30


def processors(ids: Sequence[int]) -> dict[str, dict[str, Any]]:
    """One request for every processor, and two that have several. `ids`: three tokens that the target does emit."""
    a, b, c = ids
    return {
        "plain": {},
        "temperature": {"temperature": 0.6},
        "top_k": {"top_k": 2},
        "top_p": {"top_p": 0.8},
        "min_p": {"min_p": 0.15},
        "logit_bias": {"logit_bias": ((c, 0.7), (a, -0.5))},
        "bad_words": {"bad_words": ((b, b), (c, b))},
        "allowed_token_ids": {"allowed_token_ids": (a, b)},
        "filters": {"temperature": 1.5, "top_k": 2, "top_p": 0.95, "min_p": 0.05, "logit_bias": ((b, 0.4),)},
        "repetition_penalty": {"repetition_penalty": 1.4},
        "presence_penalty": {"presence_penalty": 0.8},
        "frequency_penalty": {"frequency_penalty": 0.35},
        "min_new_tokens": {"min_new_tokens": SHORT // 2, "stop_token_ids": (c,)},
        "penalties": {"repetition_penalty": 1.2, "presence_penalty": -0.4, "frequency_penalty": 0.3, "top_p": 0.9},
    }


GROUPS: dict[str, tuple[str, ...]] = {
    "memoryless": tuple(processors(COIN_IDS))[:9],
    "history": tuple(processors(COIN_IDS))[9:],
}
"""Kinds by what their law depends on; each group is one test."""


ALL_KINDS = tuple(processors(COIN_IDS))


def num_tests(group: str) -> int:
    """Tests of one call of LAW-2: the kinds of a group, the places of a block, recovered tokens, whole blocks."""
    return len(GROUPS[group]) + (NUM_STEPS + 1) + 1 + 1


def all_tests() -> int:
    """Tests of LAW-2 in one run of the whole suite: every lane, both ways to draft, each with its control arm."""
    return len(LANES) * len(DRAFT_METHODS) * 2 * sum(map(num_tests, GROUPS))


def law_alpha() -> float:
    """False-alarm rate of one test of LAW-2."""
    return share_alpha(RUN_ALPHA * (1 - INDEPENDENCE_SHARE), all_tests())


def independence_alpha() -> float:
    """False-alarm rate of one call of LAW-3's test of independence, of which a lane makes one for each way to draft."""
    return share_alpha(RUN_ALPHA * INDEPENDENCE_SHARE, len(LANES) * len(DRAFT_METHODS))


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is sampled: `tokens` of every kind. `strength`: see `Evidence`; it grows with what is sampled."""

    tokens: int

    @property
    def strength(self) -> float:
        return max(self.tokens / 80, 5.0)


PLANS = {
    "fast": {"memoryless": Plan(60), "history": Plan(60)},
    "full": {"memoryless": Plan(80_000), "history": Plan(110_000)},
}
"""By tier and group. The full tier finds an error of 0.02 in total variation in any one kind of request, place of the
block, in recovered tokens or in all of a drafter with probability above 0.99; the fast tier finds the gross ones, of
about 0.5 in one place of the block. suites/workloads/test_laws_power.py has the figures."""

ROUND = 20_000
"""Tokens of one `Engine.run`: a run holds all of its traces."""


def kinds(
    claimed: frozenset[str], names: Sequence[str] = ALL_KINDS, ids: Sequence[int] = COIN_IDS
) -> dict[str, SamplingParams]:
    """Sampling parameters of the kinds that an engine claims. Raises `Refused` when it samples nothing."""
    if "temperature" not in claimed:
        raise Refused("temperature: not claimed in this set-up, so nothing is sampled")
    chosen = processors(ids)
    return {
        name: SamplingParams(**{"temperature": 1.0, "max_new_tokens": _length(name), **chosen[name]})
        for name in names
        if claimed.issuperset(chosen[name])
    }


def _length(kind: str) -> int:
    return SHORT if kind in GROUPS["history"] else LONG


def seeded_batch(claimed: frozenset[str], ids: Sequence[int]) -> Batch:
    """A seeded request of every kind, one with three samples, one that is long and cold enough to repeat itself, as
    drafts that are looked up need it, and greedy ones among them; all with logprobs."""
    requests = []
    for number, (kind, sampling) in enumerate(kinds(claimed, ids=ids).items()):
        seeded = replace(
            sampling,
            max_new_tokens=8,
            seed=100 + number,
            logprobs=number % 4,
            prompt_logprobs=2 if number % 3 == 0 else None,
        )
        requests.append(
            Request(request_id=kind, prompt_token_ids=_prompt(ids, number) * (1 + number % 3), sampling=seeded)
        )
        if number % 4 == 0:
            greedy = SamplingParams(max_new_tokens=7, logprobs=3)
            requests.append(
                Request(request_id=f"greedy-{number}", prompt_token_ids=_prompt(ids, number), sampling=greedy)
            )
    several = SamplingParams(temperature=1.0, seed=7, n=3, max_new_tokens=8, logprobs=5)
    requests.append(Request(request_id="several", prompt_token_ids=_prompt(ids, 5), sampling=several))
    cold = SamplingParams(temperature=0.1, seed=8, max_new_tokens=24, logprobs=2)
    requests.append(Request(request_id="cold", prompt_token_ids=_prompt(ids, 2), sampling=cold))
    fitted = [fit_request(request, claimed) for request in requests]
    return Batch(tuple(fitted), k=NUM_STEPS, changes=(("max_running", len(fitted) + 3),))


def filtered_batch(claimed: frozenset[str], ids: Sequence[int]) -> Batch:
    """Seeded requests with two filters or three each: which tokens are left hangs on the order of the filters."""
    combinations = product((0.7, 1.3), (0, 2, 4), (0.45, 0.6, 0.8), (0.0, 0.3, 0.7))
    requests = []
    for number, (temperature, top_k, top_p, min_p) in enumerate(combinations):
        if (top_k, min_p) == (0, 0.0):
            continue
        sampling = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=300 + number, max_new_tokens=7
        )
        requests.append(
            Request(request_id=f"filters-{number}", prompt_token_ids=_prompt(ids, number), sampling=sampling)
        )
    fitted = [fit_request(request, claimed) for request in requests]
    return Batch(tuple(fitted), k=NUM_STEPS, changes=(("max_running", len(fitted)),))


def copies(claimed: frozenset[str], ids: Sequence[int], max_new_tokens: int = 28) -> tuple[Request, ...]:
    """Four requests that differ in their ids alone, without a seed, and some with samples, where an engine has them:
    one without a seed, and one with a seed, if there is such a thing."""
    free = next(iter(kinds(claimed, ("plain",)).values()))
    free = replace(free, max_new_tokens=max_new_tokens)
    prompt = _prompt(ids, 1)
    twins = [Request(request_id=f"twin-{i}", prompt_token_ids=prompt, sampling=free) for i in range(4)]
    if "n" in claimed:
        for seed in (None, 11) if "seed" in claimed else (None,):
            samples = replace(free, n=3, seed=seed)
            twins.append(Request(request_id=f"samples-{seed}", prompt_token_ids=prompt, sampling=samples))
    return tuple(twins)


def rounds(engine: Engine, wanted: Mapping[str, SamplingParams], plan: Plan, ids: Sequence[int]) -> Iterator[Run]:
    """Run unseeded requests of all kinds, mixed with greedy ones, until each kind has had its tokens. Request ids begin
    with the kind and "/"."""
    done, number = 0, 0
    while done < plan.tokens:
        share = min(plan.tokens - done, max(ROUND // len(wanted), 1))
        requests = [
            Request(request_id=f"{kind}/{number}-{i}", prompt_token_ids=_prompt(ids, i), sampling=sampling)
            for kind, sampling in wanted.items()
            for i in range(-(-share // sampling.max_new_tokens))
        ]
        # Dealt out, so that kinds sit side by side; a greedy request comes after every twelve.
        requests.sort(key=lambda request: request.request_id.partition("/")[2])
        for place in range(len(requests) // 12, -1, -1):
            greedy = SamplingParams(max_new_tokens=SHORT)
            extra = Request(
                request_id=f"greedy/{number}-{place}", prompt_token_ids=_prompt(ids, place), sampling=greedy
            )
            requests.insert(12 * place, extra)
        yield engine.run(requests)
        done, number = done + share, number + 1


def _prompt(ids: Sequence[int], number: int) -> tuple[int, ...]:
    """Two tokens, all pairs in turn."""
    size = len(ids)
    return ids[number // size % size], ids[number % size]


def many_at_once(plan: Plan) -> dict[str, Any]:
    """Set-up fields for many requests a step: a step costs much the same for one request and for a hundred."""
    return {"max_running": 64 if plan.tokens < 1000 else 256, "chunk_size": 1024, "context_length": 48}


class RequestedLaw:
    """`law(request, output)`: [V] probabilities of the next token under the request's processors, float64.

    What a Markov target's law depends on is small, so it is remembered.
    """

    def __init__(self, target: Target, capabilities: Capabilities) -> None:
        self._target, self._capabilities = target, capabilities
        self._markov = isinstance(target, MarkovTarget)
        self._known: dict[Hashable, Floats] = {}

    def __call__(self, request: Request, output: tuple[int, ...]) -> Floats:
        if not self._markov:
            return self._law(request, output)
        key = _state(request, output)
        if key not in self._known:
            self._known[key] = self._law(request, output)
        return self._known[key]

    def _law(self, request: Request, output: tuple[int, ...]) -> Floats:
        sampling, target, claims = request.sampling, self._target, self._capabilities
        if sampling.regex is not None or sampling.json_schema is not None:
            raise ValueError(f"request {request.request_id!r}: has a grammar, whose law is not known in closed form")
        logits = target.logprobs((*request.prompt_token_ids, *output)).numpy()
        stops = {*sampling.stop_token_ids, target.eos_token_id}
        banned = {target.eos_token_id} if sampling.ignore_eos and claims.ignore_eos == "ban" else set()
        history = History(request.prompt_token_ids, output)
        order = claims.processor_order
        return next_token_law(logits, sampling, history, stop_ids=stops, banned_ids=banned, order=order)


def _state(request: Request, output: tuple[int, ...]) -> Hashable:
    """What the law can depend on when the target's depends on the last token alone."""
    sampling = request.sampling
    counted = (sampling.presence_penalty, sampling.frequency_penalty) != (0.0, 0.0)
    seen = sampling.repetition_penalty != 1.0
    tokens = (*request.prompt_token_ids, *output)
    back = max(map(len, sampling.bad_words), default=1) - 1
    return (
        sampling,
        tokens[-1],
        output[len(output) - min(back, len(output)) :],
        frozenset(Counter(output).items()) if counted else None,
        frozenset(tokens) if seen else None,
        len(output) < sampling.min_new_tokens,
    )
