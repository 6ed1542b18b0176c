"""Joint laws by exact integration over random numbers.

A sampler is piecewise constant in each of its coins. Given the lines between the pieces, a coin is set just inside the
ends of every piece, and the points in a piece share its weight. The sum over all points is then the integral, unless a
line of the sampler is off its place by more than `NUDGE`: and then some point lies on its wrong side. Where the lines
given are not the right ones, the law that comes out is not the target's.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

NUDGE = 1e-7
TOLERANCE = 1e-6
Tokens = tuple[int, ...]
Law = tuple[float, ...]
Laws = Callable[[Tokens], Law]
"""Path of tokens -> the law of the token after it."""
Points = list[tuple[float, float]]
"""Values of a coin with their weights, which sum to 1."""


def points(lines: Iterable[float], *, accepting: bool = False) -> Points:
    """For a coin with these lines between its pieces; lines outside (0, 1) do not matter. A coin that accepts does so
    below a line and no longer above, so it needs no point at the very low end."""
    edges = [0.0]
    for line in sorted(lines):
        if edges[-1] + 4 * NUDGE < line < 1 - 4 * NUDGE:
            edges.append(line)
    found = []
    for low, high in itertools.pairwise([*edges, 1.0]):
        inner = [high - NUDGE] if accepting and low == 0 else [low + NUDGE, high - NUDGE]
        found += [(value, (high - low) / len(inner)) for value in inner]
    return found


def draw_lines(masses: Sequence[float]) -> list[float]:
    """Where an inverse-CDF draw goes from one id to the next."""
    total = sum(masses)
    return [part / total for part in itertools.accumulate(masses)] if total > 0 else []


def seeded_laws(vocab: int, parts: int, seed: int) -> Laws:
    """A law for every path: multiples of 1 / parts, some of them 0."""

    @cache
    def law(path: Tokens) -> Law:
        rng = random.Random(f"{vocab}/{parts}/{seed}/{path}")
        counts = [int(rng.random() < 0.7) for _ in range(vocab)]
        while sum(counts) < parts:
            counts[rng.randrange(vocab)] += 1
        while sum(counts) > parts:
            counts[counts.index(max(counts))] -= 1
        return tuple(count / parts for count in counts)

    return law


def chance(laws: Laws, path: Tokens, tokens: Tokens) -> float:
    """Probability that `tokens` follow `path`."""
    product = 1.0
    for place, token in enumerate(tokens):
        product *= laws(path + tokens[:place])[token]
    return product


def sequences(vocab: int, length: int) -> Iterator[Tokens]:
    return itertools.product(range(vocab), repeat=length)


@dataclass
class Rows:
    """Arguments of many verifications, to be launched as one batch: every combination of the points of every coin.

    The coin of the last token is another one for every place where the block may end; `final` holds its points for each
    place, of which one counts once the place is known.
    """

    coins: list[list[float]] = field(default_factory=list)
    finals: list[list[float]] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)
    cases: list[int] = field(default_factory=list)

    def add(self, case: int, weight: float, coins: Sequence[Points], finals: Sequence[Points]) -> None:
        """All rows of one case, which has `weight` in all."""
        longest = max(map(len, finals))
        padded = [[*one, *[(0.5, 0.0)] * (longest - len(one))] for one in finals]
        for combination in itertools.product(*coins):
            chosen = weight
            for _, part in combination:
                chosen *= part
            for at in zip(*padded, strict=True):
                self.coins.append([value for value, _ in combination])
                self.finals.append([value for value, _ in at])
                self.weights.append([chosen * part for _, part in at])
                self.cases.append(case)

    def law(self, emitted: torch.Tensor, accept_lens: torch.Tensor, laws: Laws, vocab: int) -> dict[Tokens, float]:
        """Of as many tokens as the widest block: every block is followed by tokens of the target's law."""
        width = emitted.shape[1]
        blocks: dict[Tokens, float] = {}
        for block, length, weights in zip(emitted.tolist(), accept_lens.tolist(), self.weights, strict=True):
            tokens = tuple(block[:length])
            blocks[tokens] = blocks.get(tokens, 0.0) + weights[length - 1]
        whole = dict.fromkeys(sequences(vocab, width), 0.0)
        for block, mass in blocks.items():
            for rest in sequences(vocab, width - len(block)):
                whole[block + rest] += mass * chance(laws, block, rest)
        return whole

    def mean(self, accept_lens: torch.Tensor) -> float:
        """Expected accept length."""
        lens = accept_lens.tolist()
        return sum(n * weights[n - 1] for n, weights in zip(lens, self.weights, strict=True))


def distance(got: dict[Tokens, float], laws: Laws) -> float:
    """The largest difference of any probability from the target's."""
    return max(abs(mass - chance(laws, (), tokens)) for tokens, mass in got.items())
