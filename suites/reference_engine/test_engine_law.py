"""The whole engine, exactly: propose, verify, commit. Whatever is drafted and however, each token of a block has the
law that the request asked for, given the tokens before it, in every place of the block and for every processor.

By the chain rule so has the block. That no coin decides twice is for `test_sampled_requests`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from harness.contract import Request, SamplingParams
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.laws import COIN_IDS, NUM_STEPS, RequestedLaw, kinds
from reference_engine.sampling.random import Stream
from suites.reference_engine.coins import NUDGE, Ask, Coins, Floats, Point, Probe, Seen, cells, draws, ends, verdicts
from suites.reference_engine.conftest import OpenLane
from suites.reference_engine.support import Method

TOLERANCE = 1e-4
"""Of a probability: what cells too narrow to be hit may add up to."""
CELLS = [(name, "greedy") for name in LANES] + [
    (name, "probabilistic") for name, lane in LANES.items() if lane.speculative and lane.topk == 1 and not lane.scripted
]
PROMPT = (9, 6)


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
    def name(self) -> tuple[str, tuple[int, ...]]:
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


def requests(lane: Lane, method: Method) -> list[Request]:
    """One of every kind, and a greedy one."""
    sampled = kinds(lane.claims(method)) | {"greedy": SamplingParams()}
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


def places(probe: Probe, lane: Lane, method: Method, law: RequestedLaw) -> Iterator[Place]:
    """Every place of the first block behind each of the three tokens, and of the token of the prefill."""
    asked = [(request, first) for request in requests(lane, method) for first in COIN_IDS]
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


@pytest.mark.parametrize(("name", "method"), CELLS)
def test_every_place_of_a_block_has_its_law(open_lane: OpenLane, name: str, method: Method) -> None:
    lane = open_lane(name)
    law = RequestedLaw(lane.target("coin"), lane.capabilities)
    probe = Probe(lane.setup(family="coin", k=NUM_STEPS, draft_sample_method=method))
    found = list(places(probe, lane, method, law))
    seen = iter(probe.run(ask for place in found for ask in place.asks()))
    wrong = {}
    for place in found:
        measured = place.measured([next(seen) for _ in place.points])
        if np.abs(measured - place.law).max() > TOLERANCE:
            wrong[place.name] = measured.round(4).tolist(), place.law.round(4).tolist()
    assert not wrong
    depths = {(place.request.request_id, len(place.path) - 1) for place in found}
    steps = range(NUM_STEPS + 1) if lane.speculative else range(1)
    assert depths >= {(request.request_id, depth) for request in requests(lane, method) for depth in steps}
