"""The law of the next token under the options of a request, in float64 and in the plainest words that numpy has.

Semantics. Penalties as OpenAI defines them (presence and frequency, over output tokens) and as CTRL does (repetition,
over prompt and output: positive scores are divided, others multiplied; before the other two). top-k keeps ties with
the k-th best. top-p keeps a token while the mass of the better ones is below top_p, equal scores in order of id. min-p
keeps what has at least min_p times the best probability. Every filter sees the law that the one before it left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness.contract import SamplingParams

Floats: TypeAlias = NDArray[np.float64]

ORDER = ("penalties", "logit_bias", "temperature", "top_k", "top_p", "min_p")
"""The usual order, and the default of `Capabilities.processor_order`."""


class NothingLeft(ValueError):
    """The masks of a request leave no token."""


@dataclass(frozen=True, slots=True)
class History:
    """The token ids that came before: of the prompt, and of the output so far (draft tokens on the way included)."""

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()


def next_token_law(
    logits: ArrayLike,
    params: SamplingParams,
    history: History,
    *,
    stop_ids: Collection[int] = (),
    banned_ids: Collection[int] = (),
    following_ids: Collection[int] | None = None,
    order: Sequence[str] = ORDER,
) -> Floats:
    """[V] raw logits (or log law) -> [V] float64 probabilities.

    `stop_ids` are the stop and end-of-sequence ids, which min_new_tokens masks. `banned_ids` are never sampled (the
    end-of-sequence ids of a request with ignore_eos, in an engine that bans them). `following_ids` are all that the
    grammar of the request lets follow, None without a grammar. Temperature 0 gives all mass to the best token, the
    lowest id among equals. Raises ValueError on NaN, on an unknown step in `order`, and when nothing is
    left to sample.
    """
    return _softmax(_walk(logits, params, history, stop_ids, banned_ids, following_ids, order)[0])


def decision_gap(
    logits: ArrayLike,
    params: SamplingParams,
    history: History,
    *,
    stop_ids: Collection[int] = (),
    banned_ids: Collection[int] = (),
    following_ids: Collection[int] | None = None,
    order: Sequence[str] = ORDER,
) -> float:
    """How close, in probability, any filter (or the argmax) comes to keeping or dropping another token.

    An engine in lower precision may decide differently where this is as small as its rounding: workloads that compare
    laws exactly keep away from such places. Infinite when no filter is on.
    """
    return _walk(logits, params, history, stop_ids, banned_ids, following_ids, order)[1]


def support(law: Floats) -> frozenset[int]:
    """The ids that may be emitted."""
    return frozenset(np.flatnonzero(law > 0).tolist())


def block_law(
    logits_of: Callable[[tuple[int, ...]], ArrayLike],
    params: SamplingParams,
    prompt: tuple[int, ...],
    length: int,
    *,
    stop_ids: Collection[int] = (),
    order: Sequence[str] = ORDER,
) -> dict[tuple[int, ...], float]:
    """The joint law of the next `length` tokens after `prompt`, by enumeration (V ** length entries at most).

    `logits_of` gives the raw logits after prompt and output. A sequence ends early at a stop id.
    """
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for output, mass in laws.items():
            if output and output[-1] in stop_ids:
                longer[output] = mass
                continue
            law = next_token_law(
                logits_of((*prompt, *output)), params, History(prompt, output), stop_ids=stop_ids, order=order
            )
            longer |= {(*output, token_id): mass * float(law[token_id]) for token_id in sorted(support(law))}
        laws = longer
    return laws


def _walk(
    logits: ArrayLike,
    params: SamplingParams,
    history: History,
    stop_ids: Collection[int],
    banned_ids: Collection[int],
    following_ids: Collection[int] | None,
    order: Sequence[str],
) -> tuple[Floats, float]:
    """The scores after all steps, and the smallest gap of any decision on the way."""
    unknown = set(order) - _STEPS.keys()
    if unknown:
        raise ValueError(f"order={tuple(order)!r}: unknown steps {sorted(unknown)}; known are {sorted(_STEPS)}")
    scores = np.array(logits, dtype=np.float64)
    if scores.ndim != 1 or np.isnan(scores).any() or not scores.size:
        raise ValueError(f"logits of shape {scores.shape}: must be [V] without NaN")
    scores[list(banned_ids)] = -np.inf
    if len(history.output) < params.min_new_tokens:
        scores[list(stop_ids)] = -np.inf
    scores[list(_bad_endings(params, history))] = -np.inf
    for only in (params.allowed_token_ids or None, following_ids):
        if only is not None:
            scores = np.where(np.isin(np.arange(scores.size), list(only)), scores, -np.inf)
    gap = np.inf
    for name in order:
        scores, closest = _STEPS[name](scores, params, history)
        gap = min(gap, closest)
        if not np.isfinite(scores).any():
            raise NothingLeft(f"nothing is left to sample after {name!r}; relax the masks")
    if params.greedy:
        scores, closest = _argmax(scores)
        gap = min(gap, closest)
    return scores, gap


def _bad_endings(params: SamplingParams, history: History) -> Iterator[int]:
    """The last ids of bad words whose beginning the output ends in."""
    for word in params.bad_words:
        begun = word[:-1]
        if history.output[len(history.output) - len(begun) :] == begun:
            yield word[-1]


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def _penalties(scores: Floats, params: SamplingParams, history: History) -> tuple[Floats, float]:
    size = scores.size
    output = np.bincount(np.array(history.output, dtype=np.int64), minlength=size)[:size]
    prompt = np.bincount(np.array(history.prompt, dtype=np.int64), minlength=size)[:size]
    r = params.repetition_penalty
    repeated = np.where(scores > 0, scores / r, scores * r)
    scores = np.where(prompt + output > 0, repeated, scores)
    return scores - params.frequency_penalty * output - params.presence_penalty * (output > 0), np.inf


def _logit_bias(scores: Floats, params: SamplingParams, _history: History) -> tuple[Floats, float]:
    scores = scores.copy()
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    return scores, np.inf


def _temperature(scores: Floats, params: SamplingParams, _history: History) -> tuple[Floats, float]:
    return (scores if params.greedy else scores / params.temperature), np.inf


def _keep(scores: Floats, kept: NDArray[np.bool_], gap: float) -> tuple[Floats, float]:
    return np.where(kept, scores, -np.inf), gap


def _top_k(scores: Floats, params: SamplingParams, _history: History) -> tuple[Floats, float]:
    if params.greedy or params.top_k == 0 or params.top_k >= scores.size:
        return scores, np.inf
    kept = scores >= np.sort(scores)[-params.top_k]
    law = _softmax(scores)
    return _keep(scores, kept, float(law[kept].min() - law[~kept].max()) if not kept.all() else np.inf)


def _top_p(scores: Floats, params: SamplingParams, _history: History) -> tuple[Floats, float]:
    if params.greedy or params.top_p == 1:
        return scores, np.inf
    order = np.argsort(-scores, kind="stable")
    law = _softmax(scores)[order]
    better = np.cumsum(law) - law
    better[0] = 0.0  # the best token has none before it: not even a rounding error
    kept = better < params.top_p
    last = int(kept.sum()) - 1
    tie = float(law[last] - law[last + 1]) if last + 1 < law.size else np.inf
    gap = min(tie, float(np.abs(better[law > 0] - params.top_p).min()))
    back = np.zeros(scores.size, dtype=np.bool_)
    back[order[kept]] = True
    return _keep(scores, back, gap)


def _min_p(scores: Floats, params: SamplingParams, _history: History) -> tuple[Floats, float]:
    if params.greedy or params.min_p == 0:
        return scores, np.inf
    law = _softmax(scores)
    floor = params.min_p * law.max()
    return _keep(scores, law >= floor, float(np.abs(law - floor).min()))


def _argmax(scores: Floats) -> tuple[Floats, float]:
    law = _softmax(scores)
    best = int(scores.argmax())
    others = np.delete(law, best)
    gap = float(law[best] - others.max()) if others.size else np.inf
    return _keep(scores, np.arange(scores.size) == best, gap)


_STEPS: dict[str, Callable[[Floats, SamplingParams, History], tuple[Floats, float]]] = {
    "penalties": _penalties,
    "logit_bias": _logit_bias,
    "temperature": _temperature,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
}
