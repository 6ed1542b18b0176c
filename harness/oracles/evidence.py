"""Evidence against a law, gathered token by token: a bet whose false-alarm rate is a theorem, not an approximation.

Before each token, a law q is staked that was learnt from the earlier ones of the same context; the wealth is multiplied
by q(token) / p(token). If every token comes from its p, the wealth is a martingale from 1, so it ever reaches 1 / alpha
with probability alpha at most (Ville 1939), whatever the p are, however they depend on what was emitted, and whenever
one stops. Far out in the tail, at 1e-9 and below, where chi-squared is no fair approximation any more, that holds too.

In a context whose p stays the same, the wealth is that of a Dirichlet mixture around p. Where p changes from token to
token (penalties), what is learnt is a factor per token id.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]

STRENGTH = 1000.0
"""How many tokens the belief in p weighs against the observed ones: right for errors of about 0.02 = 0.6 / sqrt(1000).
It has a say in the power, none in the false-alarm rate."""


TINY = 1e-300
"""Keeps a token of no mass from being divided by none."""


@dataclass(slots=True)
class _Context:
    seen: Floats
    due: Floats
    log_wealth: float = 0.0


class Evidence:
    """`log_value` is the natural logarithm of the wealth."""

    def __init__(self, strength: float = STRENGTH) -> None:
        if strength <= 0:
            raise ValueError(f"strength={strength}: must be positive")
        self.strength = strength
        self.num_samples = 0
        self.log_value = 0.0
        self._contexts: dict[Hashable, _Context] = {}

    def add(self, context: Hashable, law: Floats, token_id: int) -> None:
        """`law` [V] float64 sums to 1. A token that it gives no mass is infinite evidence."""
        at = self._contexts.get(context)
        if at is None:
            at = self._contexts[context] = _Context(np.zeros(law.size), np.zeros(law.size))
        self.num_samples += 1
        chance = float(law[token_id]) if 0 <= token_id < law.size else 0.0
        if chance == 0.0:
            self.log_value = at.log_wealth = math.inf
            return
        prior = self.strength * law + TINY
        staked = law * (at.seen + prior) / (at.due + prior)
        gain = math.log(float(staked[token_id]) / float(staked.sum()) / chance)
        at.log_wealth += gain
        self.log_value += gain
        at.seen[token_id] += 1.0
        at.due += law

    def describe(self) -> str:
        """The context that speaks loudest, with its token that is furthest off."""
        context, at = max(self._contexts.items(), key=lambda item: item[1].log_wealth)
        if at.log_wealth == math.inf:
            return f"in the context {context} a token came that the law gives no mass"
        worst = int(np.abs(at.seen - at.due).argmax())
        total = at.seen.sum()
        return (
            f"in the context {context} token {worst} came {at.seen[worst]:.0f} times of {total:.0f}, and was due "
            f"{at.due[worst]:.1f} times"
        )


def log_wealth(counts: Floats, law: Floats, strength: float = STRENGTH) -> Floats:
    """The wealth of one context whose law [V] stays the same, from counts [..., V], in closed form -> [...]."""
    counts, law = np.asarray(counts, dtype=np.float64), np.asarray(law, dtype=np.float64)
    never = (counts[..., law == 0] > 0).any(-1)
    counts, law = counts[..., law > 0], law[law > 0]
    prior = strength * law
    total = special.gammaln(strength) - special.gammaln(strength + counts.sum(-1))
    odds = special.gammaln(counts + prior) - special.gammaln(prior) - counts * np.log(law)
    return np.asarray(np.where(never, np.inf, total + odds.sum(-1)), dtype=np.float64)
