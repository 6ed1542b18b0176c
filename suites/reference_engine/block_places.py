"""Every place of the block that an engine emits first, with the coins that lead there and those that decide it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness.contract import Request, SamplingParams
from harness.workloads.lane import Lane
from harness.workloads.laws import ALL_KINDS, COIN_IDS, NUM_STEPS, RequestedLaw, kinds
from reference_engine.sampling.random import Stream
from suites.reference_engine.coins import NUDGE, Ask, Coins, Floats, Point, Probe, Seen, cells, draws, ends, verdicts
from suites.reference_engine.support import Method

TOLERANCE = 1e-4
"""Of a probability: what cells too narrow to be hit may add up to."""
PROMPT = (15,)


Name = tuple[str, tuple[int, ...]]
"""A kind of request and the output before the token."""


@dataclass
class Place:
    """One place of a block: after `path` the token has the law `law`. `points` are all coins that decide it."""

    request: Request
    path: tuple[int, ...]
    law: Floats
    forced: Coins
    points: list[Point]
    expected_drafts: list[int | None] = field(default_factory=list)

    @property
    def name(self) -> Name:
        return self.request.request_id, self.path

    def asks(self) -> Iterator[Ask]:
        for point in self.points:
            yield Ask(self.request, self.path[:1], {**self.forced, **point.coins})

    def measured(self, seen: list[Seen]) -> Floats:
        """What the points come to, in probabilities; each must have reached this place."""
        total = np.zeros_like(self.law)
        depth = len(self.path) - 1
        for point, came, draft in zip(self.points, seen, self.expected_drafts or [None] * len(seen), strict=True):
            assert came.block[:depth] == self.path[1:], f"{self.name}: the block {came.block} is not on the path"
            assert draft is None or came.drafts[depth] == draft, f"{self.name}: drafted {came.drafts}, not {draft}"
            total[came.block[depth]] += point.weight
        return total


def requests(lane: Lane, method: Method, names: Sequence[str] = ALL_KINDS) -> list[Request]:
    """One of every kind, and a greedy one."""
    sampled = kinds(lane.claims(method), names) | {"greedy": SamplingParams()}
    return [
        Request(request_id=kind, prompt_token_ids=PROMPT, sampling=replace(params, max_new_tokens=10))
        for kind, params in sampled.items()
    ]


def greedy_places(asked: Request, first: int, seen: Seen, law: RequestedLaw) -> Iterator[Place]:
    """The nodes of a chain or tree that was drafted without chance, each behind the coins that lead there."""
    children: dict[int, list[int]] = {}
    for node, (token, parent) in enumerate(zip(seen.drafts, seen.parents, strict=True), start=1):
        if token >= 0:
            children.setdefault(parent, []).append(node)

    def walk(node: int, path: tuple[int, ...], forced: Coins) -> Iterator[Place]:
        here, depth = law(asked, path), len(path) - 1
        tokens = [seen.drafts[child - 1] for child in children.get(node, [])]
        yield Place(asked, path, here, forced, list(verdicts(depth, here, tokens)))
        coins, left = dict(forced), 1.0
        for number, (child, token) in enumerate(zip(children.get(node, []), tokens, strict=True)):
            if here[token] > NUDGE:
                yield from walk(child, (*path, token), {**coins, (depth, Stream.SIBLING + number): 0.0})
            if here[token] >= left - NUDGE:
                break  # always accepted: the siblings behind it are never tried
            coins[depth, Stream.SIBLING + number] = 1 - NUDGE
            left -= here[token]

    yield from walk(0, (first,), {})


def drawn_places(
    probe: Probe,
    asked: list[tuple[Request, int]],
    law: RequestedLaw,
    place: int,
    paths: list[tuple[tuple[int, ...], Coins]],
) -> Iterator[tuple[Place, tuple[tuple[int, ...], Coins]]]:
    """One place of chains whose drafts are drawn, with all coins of the draft, and the likeliest way to the next."""
    surveyed = probe.run(
        Ask(request, path[:1], coins) for (request, _), (path, coins) in zip(asked, paths, strict=True)
    )
    for (request, _), (path, coins), seen in zip(asked, paths, surveyed, strict=True):
        assert seen.probs is not None
        here, q = law(request, path), seen.probs[place]
        points: list[Point] = []
        drafts: list[int | None] = []
        for token, low, high in cells(q):
            # Where a draft begins and ends to be drawn is looked at once; how it is verified, once behind its middle.
            looks = [Point({(place, Stream.DRAFT): coin}, 0.0) for coin, _ in ends(low, high)]
            middle = {(place, Stream.DRAFT): (low + high) / 2}
            looks += [point.and_(middle, high - low) for point in verdicts(place, here, [token], q)]
            points += looks
            drafts += [token] * len(looks)
        best = max(cells(q), key=lambda cell: min(here[cell[0]], q[cell[0]]))
        way = {**coins, (place, Stream.DRAFT): (best[1] + best[2]) / 2}
        yield Place(request, path, here, coins, points, drafts), ((*path, best[0]), way)


def places(probe: Probe, wanted: Sequence[Request], method: Method, law: RequestedLaw) -> Iterator[Place]:
    """Every place of the first block behind each of the three tokens."""
    asked = [(request, first) for request in wanted for first in COIN_IDS]
    if method == "greedy":
        surveyed = probe.run(Ask(request, (first,), {}) for request, first in asked)
        for (request, first), seen in zip(asked, surveyed, strict=True):
            yield from greedy_places(request, first, seen, law)
        return
    paths: list[tuple[tuple[int, ...], Coins]] = [((first,), {}) for _, first in asked]
    for place in range(NUM_STEPS):
        found = list(drawn_places(probe, asked, law, place, paths))
        yield from (here for here, _ in found)
        going = [(ask, way) for ask, (here, way) in zip(asked, found, strict=True) if here.law[way[0][-1]] > NUDGE]
        asked, paths = [ask for ask, _ in going], [way for _, way in going]
    for (request, _), (path, coins) in zip(asked, paths, strict=True):
        here = law(request, path)
        yield Place(request, path, here, coins, list(draws([Point({}, 1.0)], NUM_STEPS, here)))


def judged(lane: Lane, method: Method, wanted: Sequence[Request]) -> dict[Name, tuple[Floats, Floats]]:
    """By kind and path, the law measured in each place of a block and the true one."""
    law = RequestedLaw(lane.target("coin"), lane.capabilities)
    probe = Probe(lane.setup(family="coin", k=NUM_STEPS, draft_sample_method=method))
    found = list(places(probe, wanted, method, law))
    seen = iter(probe.run(ask for place in found for ask in place.asks()))
    return {place.name: (place.measured([next(seen) for _ in place.points]), place.law) for place in found}


def prefilled(lane: Lane, method: Method, wanted: Sequence[Request]) -> dict[Name, tuple[Floats, Floats]]:
    """The same for the token that is sampled behind the prompt."""
    law = RequestedLaw(lane.target("coin"), lane.capabilities)
    probe = Probe(lane.setup(family="coin", k=NUM_STEPS, draft_sample_method=method))
    out = {}
    for request in wanted:
        here = law(request, ())
        points = list(draws([Point({}, 1.0)], 0, here))
        measured = np.zeros_like(here)
        for point, came in zip(points, probe.run(Ask(request, (), point.coins) for point in points), strict=True):
            measured[came.block[0]] += point.weight
        out[request.request_id, ()] = measured, here
    return out


def wrong(found: dict[Name, tuple[Floats, Floats]]) -> dict[Name, tuple[list[float], list[float]]]:
    """The places whose laws differ, with what was measured and what is right."""
    return {
        name: (measured.round(5).tolist(), law.round(5).tolist())
        for name, (measured, law) in found.items()
        if np.abs(measured - law).max() > TOLERANCE
    }
