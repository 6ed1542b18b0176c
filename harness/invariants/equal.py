"""EQUAL: speculation and every way of running a request change nothing that the user can see."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.contract import Run
from harness.invariants.base import Violation, blame, invariant
from harness.invariants.compare import (
    Pair,
    Terms,
    compare,
    compare_rows,
    first_difference,
    paired,
    token_fault,
)
from harness.invariants.rows import plain

Replay = Callable[[tuple[int, ...]], torch.Tensor]
"""Prefix token ids -> [V] logits (or log law) of the target for the next token, from a single-token replay."""


@invariant(
    "EQUAL-1",
    statement="greedy output with speculation == without, token for token; in reduced precision a first difference "
    "counts unless the target's own gap there is inside the measured noise",
    needs={"completion", "baseline"},
)
def equal_1(run: Run, baseline: Run, replay: Replay | None = None, noise: float = 0.0) -> list[Violation]:
    """Compare every greedy request with the non-speculative `baseline`.

    Without `replay` equality is exact, in any precision. With it, both tokens at a first difference are scored by the
    target: a gap to its best token of more than `noise` (in the units of `replay`, as measured on the control arm)
    counts, against the run or, when it is the baseline that strayed, against the control arm. What follows a forgiven
    difference is another text and is not compared.
    """
    pairs, out = paired("EQUAL-1", run, baseline, "baseline")
    terms = Terms.of(run, "baseline")
    for pair in pairs:
        row = first_difference(pair.got.token_ids, pair.right.token_ids)
        both = row is not None and row < min(len(pair.got.token_ids), len(pair.right.token_ids))
        if replay is None or row is None or not both:
            out += compare("EQUAL-1", pair, terms)
        else:
            out += _scored(pair, terms, row, replay, noise) + compare_rows("EQUAL-1", pair, terms, row)
    return out


def _scored(pair: Pair, terms: Terms, row: int, replay: Replay, noise: float) -> list[Violation]:
    prefix = (*pair.right.prompt_token_ids, *pair.right.token_ids[:row])
    scores = plain(replay(prefix))
    fault = token_fault("EQUAL-1", pair, terms, row)
    out = []
    for who, token_id in (("the run's", pair.got.token_ids[row]), ("the baseline's", pair.right.token_ids[row])):
        inside = 0 <= token_id < scores.shape[0]
        gap = float(scores.max() - scores[token_id]) if inside else float("inf")
        if not gap <= noise:  # a NaN gap is no excuse
            control = " (the control arm fails: not the fault of speculation)" if who == "the baseline's" else ""
            message = (
                f"{fault.message}: {who} token is {gap:.4g} below the target's best, noise is {noise:.4g}{control}"
            )
            best = int(scores.argmax())
            out.append(
                blame("EQUAL-1", pair.key, message, position=fault.position, row=row, expected=best, got=token_id)
            )
    return out


@invariant(
    "EQUAL-2",
    statement="metamorphic: alone == in a batch == permuted == chunked prefill of any size == warm prefix == preempted "
    "and resumed == overlap on/off == any k, topk, page size, padding bucket, drafter",
    needs={"completion", "baseline"},
)
def equal_2(
    run: Run, variant: Run, accept_lens: bool = False, seeded: bool = False, name: str = "variant"
) -> list[Violation]:
    """Compare the requests that both runs hold; `name` says in messages what the variant is.

    `accept_lens` demands the same accept and draft lengths as well (same drafter and k on both sides). `seeded`
    includes sampled requests that have a seed, where the variant may not change how random numbers are spent.
    """
    pairs, out = paired("EQUAL-2", run, variant, name, seeded=seeded, all_of_run=False)
    terms = Terms.of(run, name, accept_lens=accept_lens)
    return out + [violation for pair in pairs for violation in compare("EQUAL-2", pair, terms)]
