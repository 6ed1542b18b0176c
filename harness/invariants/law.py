"""LAW: what is emitted has exactly the law that the target and the request's processors give it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from harness.contract import Completion, Request, Run
from harness.invariants.base import Key, Misuse, Violation, blame, invariant
from harness.invariants.blocks import places
from harness.invariants.compare import Terms, compare, paired
from harness.invariants.trace import counted_rows, verify_rows
from harness.invariants.wellformed import sound_completions, wanted_keys

Floats = NDArray[np.float64]
RequestedLaw = Callable[[Request, tuple[int, ...]], Floats]
"""A request and its output so far -> [V] probabilities of the next token, its processors applied."""


class Evidence(Protocol):
    """Wealth against a law: under it, `log_value` reaches log(1 / alpha) with probability alpha at most, ever."""

    @property
    def log_value(self) -> float: ...

    @property
    def num_samples(self) -> int: ...

    def add(self, context: Hashable, law: Floats, token_id: int) -> None:
        """`token_id` came where `law` was due; `context` was known before it came."""
        ...

    def describe(self) -> str:
        """Where the law is missed most."""
        ...


@invariant(
    "LAW-1",
    statement="support: no token of probability zero under the requested processors is ever emitted",
    needs={"completion", "known_answer"},
)
def law_1(run: Run, law: RequestedLaw) -> list[Violation]:
    """Judge every token of every request; of a grey box also what a block accepted behind the end of its request.

    A greedy request has one possible token (or several, where the law says so).
    """
    found, out = sound_completions("LAW-1", run)
    rows = counted_rows(verify_rows("LAW-1", run)[0])
    for request, key in wanted_keys(run):
        if key not in found:
            continue
        done = found[key]
        where = places(run, done)
        for row, token_id in enumerate(done.token_ids):
            origin = str(where[row]) if where else None
            out += _impossible(key, request, tuple(done.token_ids[:row]), token_id, law, origin)
        blocks = [row.block for row in rows.get(key, [])]
        cut = 1 + sum(map(len, blocks)) - len(done.token_ids)
        if blocks and 0 < cut <= len(blocks[-1]) and done.finish_reason != "abort":
            tail, output = blocks[-1][-cut:], tuple(done.token_ids)
            for place, token_id in enumerate(tail):
                origin = "accepted in the last block, behind the end of the request"
                out += _impossible(key, request, output + tail[:place], token_id, law, origin)
    return out


def _impossible(
    key: Key, request: Request, output: tuple[int, ...], token_id: int, law: RequestedLaw, origin: str | None
) -> list[Violation]:
    here = law(request, output)
    if 0 <= token_id < here.size and here[token_id] > 0:
        return []
    possible = np.flatnonzero(here > 0).tolist()
    right = f"one of {possible}" if len(possible) < 10 else f"one of {len(possible)} tokens"
    message = "a token of probability zero was emitted"
    position, row = len(request.prompt_token_ids) + len(output), len(output)
    return [blame("LAW-1", key, message, position=position, row=row, expected=right, got=token_id, origin=origin)]


@invariant(
    "LAW-3",
    statement="a seeded request gives the same output alone, in a batch, and again; unseeded requests are independent",
    needs={"completion", "baseline"},
)
def law_3(run: Run, variant: Run, name: str = "variant", accept_lens: bool = False) -> list[Violation]:
    """Compare the sampled requests with a seed that both runs hold; `name` says what the variant is.

    `accept_lens` demands the same blocks as well. Raises `Misuse` when there is no such request.
    """
    pairs, out = paired("LAW-3", run, variant, name, seeded=True, all_of_run=False)
    sampled = [pair for pair in pairs if not pair.request.sampling.greedy]
    if not sampled and not out:
        raise Misuse(f"{name}: no sampled request with a seed is in both runs; there is nothing to compare")
    terms = Terms.of(run, name, accept_lens=accept_lens)
    return out + [violation for pair in sampled for violation in compare("LAW-3", pair, terms)]


@invariant("LAW-3", needs={"completion", "known_answer"})
def law_3_independent(run: Run, law: RequestedLaw, alpha: float) -> list[Violation]:
    """Copies of one sampled request (the same but for its id, without a seed), and the `n` samples of any, go their own
    ways. `alpha`: probability of failing an engine whose copies are independent.

    Each stream is read up to where it is as unlikely as alpha over the number of pairs: another one begins the same
    with no more than that probability. Raises `Misuse` where a stream ends before, or no request has a copy.
    """
    found, out = sound_completions("LAW-3", run)
    groups: dict[Request, list[tuple[Request, Completion]]] = {}
    for request, key in wanted_keys(run):
        sampling = request.sampling
        if key in found and not sampling.greedy and (sampling.seed is None or sampling.n > 1):
            name = "copy" if sampling.seed is None else request.request_id
            group = replace(request, request_id=name, arrival_step=0, sampling=replace(sampling, n=1))
            groups.setdefault(group, []).append((request, found[key]))
    pairs = [pair for group in groups.values() for pair in combinations(group, 2)]
    if not pairs and not out:
        raise Misuse("no sampled request has a copy without a seed or several samples; there is nothing to compare")
    for (request, one), (_, other) in pairs:
        length = _telling(request, one, law, alpha / len(pairs))
        if one.token_ids[:length] == other.token_ids[:length]:
            twin = f"request {other.request_id!r} sample {other.index}"
            message = f"two samples that must be independent begin with the same {length} tokens"
            key = (one.request_id, one.index)
            out.append(blame("LAW-3", key, message, expected="another stream", got=one.token_ids[:length], origin=twin))
    return out


def _telling(request: Request, done: Completion, law: RequestedLaw, alpha: float) -> int:
    """How many tokens of a stream make it as unlikely as `alpha`."""
    chance = 1.0
    for row, token_id in enumerate(done.token_ids):
        chance *= float(law(request, tuple(done.token_ids[:row]))[token_id])
        if chance <= alpha:
            return row + 1
    raise Misuse(
        f"request {request.request_id!r}: its {len(done.token_ids)} tokens have probability {chance:.3g}, more than "
        f"{alpha:.3g}: too likely to tell copies apart; ask for more tokens"
    )


BLOCK_WITHOUT_DRAFTS = 3
"""Tokens per block of the control arm."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token of known law. `strata` pairs the name of each test that it counts for with a context: what may tell
    apart laws that are wrong in different ways, and was known before the token came."""

    law: Floats
    token_id: int
    strata: tuple[tuple[str, Hashable], ...]


@invariant(
    "LAW-2",
    statement="the joint law of emitted blocks equals the target's (exact by enumeration for samplers; goodness of fit "
    "for engines)",
    needs={"runs", "known_answer"},
)
def law_2(
    runs: Iterable[Run],
    law: RequestedLaw,
    evidence: Callable[[], Evidence],
    alpha: float,
    num_tests: int,
    control: Sequence[Violation] = (),
) -> list[Violation]:
    """Goodness of fit of all sampled tokens: for each kind of request (its id up to "/"), each place of the block, the
    recovered tokens where drafts are without chance, and the blocks of num_steps + 1 tokens as a whole.

    Each of these is one test at `alpha`; `num_tests` says how many were planned for, and more raise `Misuse`. `runs`
    are taken one by one and dropped. `control` is what the same check found without speculation: then that is
    reported, and nothing is blamed on speculation.
    """
    if control:
        said = "the control arm, without speculation, fails: not the fault of speculation: "
        return [replace(violation, message=said + violation.message) for violation in control]
    strata: dict[str, Evidence] = {}
    out: list[Violation] = []
    limit = -math.log(alpha)
    for run in runs:
        found, flaws = sound_completions("LAW-2", run)
        out += flaws
        rejected = _rejected(run)
        for request, key in wanted_keys(run):
            if key in found and not request.sampling.greedy:
                for draw in _draws(run, request, found[key], law, rejected.get(key, {})):
                    for name, context in draw.strata:
                        if name not in strata:
                            strata[name] = evidence()
                        strata[name].add(context, draw.law, draw.token_id)
        if any(wealth.log_value >= limit for wealth in strata.values()):
            break  # more runs could not take it back
    if len(strata) > num_tests:
        raise Misuse(f"num_tests={num_tests}: {len(strata)} were made ({', '.join(strata)}); plan for as many")
    if not strata and not out:
        raise Misuse("runs: no sampled token was emitted; there is nothing to judge")
    return out + [_misfit(name, wealth, limit) for name, wealth in strata.items() if wealth.log_value >= limit]


def _misfit(name: str, wealth: Evidence, limit: float) -> Violation:
    return Violation(
        invariant="LAW-2",
        message=f"{name}: the tokens do not have the law of the target",
        expected=f"log evidence below {limit:.4g}",
        got=f"{wealth.log_value:.4g} after {wealth.num_samples} tokens",
        origin=wealth.describe(),
    )


def _rejected(run: Run) -> dict[Key, dict[int, int]]:
    """By request and verify step, the draft that was rejected: where a grey box shows chains drafted without chance,
    so that nothing but the draft itself is ruled out for the token that is drawn instead."""
    drafter = run.setup.drafter
    if drafter is None or drafter.topk > 1 or drafter.draft_sample_method != "greedy":
        return {}
    return {
        key: {
            step: row.drafts[row.accept_len - 1]
            for step, row in enumerate(rows)
            if 0 < row.accept_len <= row.num_drafts
        }
        for key, rows in counted_rows(verify_rows("LAW-2", run)[0]).items()
    }


def _draws(run: Run, request: Request, done: Completion, law: RequestedLaw, rejected: dict[int, int]) -> Iterator[Draw]:
    """Every output token, its law, and the tests that it counts for, each with a context."""
    where = places(run, done)
    kind = request.request_id.partition("/")[0]
    size = run.setup.drafter.num_steps + 1 if run.setup.drafter is not None else BLOCK_WITHOUT_DRAFTS
    tokens, prompt_len = (*done.prompt_token_ids, *done.token_ids), len(done.prompt_token_ids)
    start: int | None = None
    for row, token_id in enumerate(done.token_ids):
        output, before = tuple(done.token_ids[:row]), tokens[prompt_len + row - 1]
        here = law(request, output)
        strata: list[tuple[str, Hashable]] = [(f"requests {kind!r}", (before, _memory(request, output)))]
        if where and where[row].kind != "prefill":
            strata.append((f"place {where[row].place} of the block", before))
        if start is None and (not where or where[row].place == 0):
            start = row
        if start is not None:
            strata.append((f"blocks of {size} tokens", tokens[prompt_len + start - 1 : prompt_len + row]))
            start = None if row + 1 == start + size else start
        yield Draw(here, token_id, tuple(strata))
        if where and where[row].kind == "recovered" and where[row].step in rejected:
            yield _recovered(here, token_id, rejected[where[row].step], before)


def _memory(request: Request, output: tuple[int, ...]) -> Hashable:
    """What the law may depend on beside the token before: with a penalty the tokens that were there."""
    sampling = request.sampling
    penalised = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)
    return frozenset(output) if penalised else None, len(output) < sampling.min_new_tokens


def _recovered(here: Floats, token_id: int, draft: int, before: int) -> Draw:
    """The law of a token that replaces `draft`: that of the target without it."""
    rest = here.copy()
    rest[draft] = 0.0
    total = float(rest.sum())
    return Draw(rest / total if total > 0 else rest, token_id, (("recovered tokens", (before, draft)),))
