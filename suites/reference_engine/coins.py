"""The law of each place of a block, integrated exactly over the random numbers that an engine is given.

A coin is an argument of a step function. Where its steps lie follows from the laws, so it is set just inside both ends
of every step, each point with the weight of half the step: the sum over the points is the integral, as long as no step
is off its place by more than `NUDGE`. A step that is off puts half a cell on the wrong token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from harness.contract import EngineSetup, Request
from reference_engine import EngineConfig, LLMEngine, SamplingParams, SpecConfig
from reference_engine.sampling.random import Stream

Floats = NDArray[np.float64]
NUDGE = 1e-5
Coins = Mapping[tuple[int, int], float]
"""(place, stream) -> number. Place 0 is the first token behind those that are committed."""
ROWS = 512
"""Requests of one launch."""
PLACES = 4
STREAMS = (Stream.FINAL, Stream.DRAFT, *(Stream.SIBLING + i for i in range(8)))


@dataclass(frozen=True)
class Point:
    """A choice of coins and the share of all choices that it stands for."""

    coins: Coins
    weight: float

    def and_(self, coins: Coins, weight: float) -> Point:
        return Point({**self.coins, **coins}, self.weight * weight)


def ends(low: float, high: float) -> list[tuple[float, float]]:
    """(coin, weight) just inside both ends of [low, high); nothing where it is too narrow to be hit."""
    return [] if high - low < 4 * NUDGE else [(low + NUDGE, (high - low) / 2), (high - NUDGE, (high - low) / 2)]


def cells(law: Floats) -> Iterator[tuple[int, float, float]]:
    """(token, low, high): the coins that draw each token of `law` (any scale) by inverse CDF, ids ascending; none for
    tokens whose cell is too narrow to be hit."""
    edges = np.concatenate([[0.0], np.cumsum(law / law.sum())])
    for token in np.flatnonzero(np.diff(edges) >= 4 * NUDGE).tolist():
        yield token, float(edges[token]), float(edges[token + 1])


def draws(points: Iterable[Point], place: int, law: Floats) -> Iterator[Point]:
    """The points, times those of the coin that ends a block at `place` with a token of `law`."""
    for point in points:
        for _, low, high in cells(law):
            for coin, weight in ends(low, high):
                yield point.and_({(place, Stream.FINAL): coin}, weight)


def verdicts(place: int, law: Floats, children: Sequence[int], q: Floats | None = None) -> Iterator[Point]:
    """All coins of verification at one place: of the drafts `children`, tried in order, and of the token that replaces
    them. `q`: what the one draft of a chain was drawn from, None for drafts without chance."""
    open_, rest, left = [Point({}, 1.0)], law.copy(), 1.0
    for number, draft in enumerate(children):
        step = min(1.0, rest[draft] / (left if q is None else q[draft])) if rest[draft] > 0 else 0.0
        for point in open_:
            for coin, weight in ends(0.0, step):
                yield point.and_({(place, Stream.SIBLING + number): coin}, weight)
        open_ = [
            point.and_({(place, Stream.SIBLING + number): coin}, weight)
            for point in open_
            for coin, weight in ends(step, 1.0)
        ]
        left -= rest[draft]
        rest[draft] = 0.0
    if q is not None and np.maximum(rest - q, 0.0).sum() > 0:
        rest = np.maximum(rest - q, 0.0)
    if open_:
        yield from draws(open_, place, rest)


@dataclass(frozen=True)
class Ask:
    """A request, the output that it has already, and the coins of its next tokens."""

    request: Request
    committed: tuple[int, ...]
    coins: Coins


@dataclass(frozen=True)
class Seen:
    """What came of it: the block of one verify step (or the token of the prefill), the drafts [n - 1], their parents
    and laws [k, V]."""

    block: tuple[int, ...]
    drafts: tuple[int, ...]
    parents: tuple[int, ...]
    probs: Floats | None


class Table:
    """Random numbers out of a table, by row: the seed of a request is its row. What is not in it is 0: accept."""

    def __init__(self) -> None:
        self.values = torch.zeros(ROWS, PLACES, len(STREAMS), dtype=torch.float64)
        self.start = torch.zeros(ROWS, dtype=torch.long)

    def fill(self, asks: Sequence[Ask]) -> None:
        self.values.zero_()
        for row, ask in enumerate(asks):
            self.start[row] = len(ask.request.prompt_token_ids) + len(ask.committed)
            for (place, stream), value in ask.coins.items():
                self.values[row, place, STREAMS.index(stream)] = value

    def uniform(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        rows, positions = torch.broadcast_tensors(seeds, positions)
        places = (positions - self.start[rows]).clamp(0, PLACES - 1)
        return self.values[rows, places, STREAMS.index(stream)]


class Probe:
    """An engine that runs many requests for one block each, every one with coins of its own."""

    def __init__(self, setup: EngineSetup) -> None:
        spec = None
        if setup.drafter is not None:
            spec = SpecConfig(**{field.name: getattr(setup.drafter, field.name) for field in fields(SpecConfig)})
        self.table = Table()
        config = EngineConfig(model=setup.target, spec=spec, context_length=24, max_running=ROWS, chunk_size=ROWS * 8)
        self.engine = LLMEngine(config, self.table)

    def run(self, asks: Iterable[Ask]) -> list[Seen]:
        rest, seen = iter(asks), []
        while batch := list(islice(rest, ROWS)):
            seen += self._run(batch)
        return seen

    def _run(self, asks: Sequence[Ask]) -> list[Seen]:
        engine = self.engine
        self.table.fill(asks)
        for row, ask in enumerate(asks):
            sampling = {field.name: getattr(ask.request.sampling, field.name) for field in fields(SamplingParams)}
            params = SamplingParams(**{**sampling, "seed": row})
            engine.add_request(str(row), ask.request.prompt_token_ids, params, committed_token_ids=ask.committed)
        blocks = {output.request_id: output.token_ids for output in engine.step().outputs}
        states = sorted(engine.requests(), key=lambda state: int(state.request_id))
        rows = [state.row for state in states]
        assert len(rows) == len(asks), "a request ended with its first token"
        pool = engine.pool
        drafts, parents = pool.draft_tokens[rows].tolist(), pool.draft_parents[rows].tolist()
        probs = None if pool.draft_probs is None else pool.draft_probs[rows].double().numpy()
        if any(ask.committed for ask in asks):
            assert all(ask.committed for ask in asks), "ask for prefills and for blocks in batches of their own"
            blocks = {output.request_id: output.token_ids for output in engine.step().outputs}
        for row in range(len(asks)):
            engine.abort(str(row))
        engine.step()
        return [
            Seen(
                tuple(blocks[str(row)]), tuple(drafts[row]), tuple(parents[row]), None if probs is None else probs[row]
            )
            for row in range(len(asks))
        ]
