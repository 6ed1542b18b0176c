"""Chains: the tokens emitted are exactly as likely as the target says, whatever the drafter proposes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import mass
from reference_engine.sampling.processors import draw
from reference_engine.verification.base import Verdict
from reference_engine.verification.chain import verify_chain_greedy, verify_chain_sampled
from suites.reference_engine.laws import (
    TOLERANCE,
    Laws,
    Tally,
    Tokens,
    all_coins,
    chance,
    check_verdict,
    completed,
    distance,
    seeded_laws,
    sequences,
    target_law,
)
from suites.registration import suite

suite(seconds=3, stage="cpu", needs="cpu")

Verify = Callable[..., Verdict]
FINAL_CELLS = 12
"""A residual of multiples of 1/4 is normalised by up to four of them."""

SHAPES = {"k1": (5, 1, 4, 12), "k2": (3, 2, 4, 12), "k2-wide": (4, 2, 4, 12), "k3": (3, 3, 2, 4)}
"""Vocabulary, k, denominator of the drafter's laws, cells of an accept coin (thresholds p / q, of p if q is 1)."""


def blocks(
    verify: Verify, draft: Tokens, target: Laws, drafter: Laws | None, cells: int, dtype: torch.dtype = torch.float64
) -> Tally:
    """Law of the block that one chain of drafts leads to; -1 in `draft` = no draft from there on."""
    k = len(draft)
    coins = all_coins([*[cells] * k, FINAL_CELLS])
    rows = len(coins)
    paths = [tuple(max(token, 0) for token in draft[:place]) for place in range(k + 1)]
    probs = torch.tensor([target(path) for path in paths], dtype=dtype).expand(rows, -1, -1)
    draft_probs = None
    if drafter is not None:
        draft_probs = torch.tensor([drafter(path) for path in paths[:-1]], dtype=dtype).expand(rows, -1, -1)
    # One final coin is looked at, that of the position where the chain ends, so all may be the same.
    final = coins[:, -1:].expand(-1, k + 1)
    tokens = torch.tensor(draft, dtype=torch.long).reshape(1, k).expand(rows, -1)
    return Tally.of(verify(tokens, draft_probs, probs, coins[:, :k], final))


def error(verify: Verify, shape: str, seed: int, *, with_probs: bool, dtype: torch.dtype = torch.float64) -> float:
    """Largest difference between the law of k + 1 tokens and the target's, over all drafts or for the worst draft."""
    vocab, k, parts, cells = SHAPES[shape]
    target = seeded_laws(vocab, 4, seed)
    drafter = target if seed == 0 and parts == 4 else seeded_laws(vocab, parts, seed + 1000)
    right = target_law(target, vocab, k + 1)
    total: dict[Tokens, float] = dict.fromkeys(right, 0.0)
    worst = 0.0
    for draft in sequences(vocab, k):
        weight = chance(drafter, (), draft) if with_probs else 1.0
        if weight == 0.0:
            continue
        tally = blocks(verify, draft, target, drafter if with_probs else None, cells if with_probs else 4, dtype)
        law = completed(tally.masses, target, vocab, k + 1)
        if with_probs:
            total = {tokens: mass + weight * law[tokens] for tokens, mass in total.items()}
        else:
            worst = max(worst, distance(law, right))
    return distance(total, right) if with_probs else worst


@pytest.mark.parametrize("with_probs", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_law_is_the_targets(shape: str, seed: int, with_probs: bool) -> None:
    """Drawn drafts in sum over the drafter's law (for seed 0 the target itself), chosen ones each on its own."""
    assert error(verify_chain_sampled, shape, seed, with_probs=with_probs) < TOLERANCE


def test_the_law_in_float32() -> None:
    assert error(verify_chain_sampled, "k2", 1, with_probs=True, dtype=torch.float32) < TOLERANCE


@pytest.mark.parametrize("draft", [(-1, -1), (0, -1), (2, -1), (1, 1)])
@pytest.mark.parametrize("with_probs", [True, False], ids=["drawn", "chosen"])
def test_missing_drafts_leave_the_law_alone(draft: Tokens, with_probs: bool) -> None:
    """A chain may be shorter than the window. Given its tokens, those that were drawn must have come from q."""
    target, drafter = seeded_laws(3, 4, 7), seeded_laws(3, 4, 8, sparse=False)
    whole = target_law(target, 3, 3)
    if not with_probs:
        law = completed(blocks(verify_chain_sampled, draft, target, None, 4).masses, target, 3, 3)
        assert distance(law, whole) < TOLERANCE
        return
    total = dict.fromkeys(whole, 0.0)
    for drawn in sequences(3, sum(token >= 0 for token in draft)):
        padded = (*drawn, *[-1] * (len(draft) - len(drawn)))
        tally = blocks(verify_chain_sampled, padded, target, drafter, 12)
        for tokens, share in completed(tally.masses, target, 3, 3).items():
            total[tokens] += chance(drafter, (), drawn) * share
    assert distance(total, whole) < TOLERANCE


def eager(factor: float) -> Verify:
    def verify(
        tokens: torch.Tensor, q: torch.Tensor, p: torch.Tensor, accept: torch.Tensor, u: torch.Tensor
    ) -> Verdict:
        return verify_chain_sampled(tokens, q, p, accept / factor, u)

    return verify


def skewed_bonus(tokens: torch.Tensor, q: torch.Tensor, p: torch.Tensor, a: torch.Tensor, u: torch.Tensor) -> Verdict:
    bonus = 0.99 * p[:, -1:] + 0.01 / p.shape[2]
    return verify_chain_sampled(tokens, q, torch.cat([p[:, :-1], bonus], dim=1), a, u)


def not_taken_out(tokens: torch.Tensor, q: torch.Tensor, p: torch.Tensor, a: torch.Tensor, u: torch.Tensor) -> Verdict:
    """Recovered tokens come from p where they must come from max(p - q, 0)."""
    verdict = verify_chain_sampled(tokens, q, p, a, u)
    again = draw(p.flatten(0, 1), u.flatten(), "torch").view(u.shape)
    end = torch.arange(p.shape[1]) == verdict.accept_lens[:, None] - 1
    return Verdict(torch.where(end, again, verdict.emitted), verdict.accept_lens, verdict.accept_index)


FAULTS: dict[str, Verify] = {
    "ratio 1% up": eager(1.01),
    "ratio 1% down": eager(0.99),
    "bonus 1% off": skewed_bonus,
    "residual is p": not_taken_out,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rule_that_is_one_percent_off_is_red(fault: str, shape: str) -> None:
    """In one of a few laws at least: where no threshold lies inside (0, 1) a ratio may be what it likes."""
    assert any(error(FAULTS[fault], shape, seed, with_probs=True) > 100 * TOLERANCE for seed in range(1, 5))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_residual_that_is_one_percent_off_is_red(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is drawn at the end of a block, recovered tokens included, with 1% of another law in it."""
    right = mass.draw_of
    monkeypatch.setattr(mass, "draw_of", lambda p, *rest: right(0.99 * p + 0.01 * p.flip(-1), *rest))
    assert error(verify_chain_sampled, shape, 1, with_probs=True) > 100 * TOLERANCE


def test_only_the_coins_of_its_own_position_decide_a_token() -> None:
    """Coins of later positions may be anything: they will be used again when those positions are decided."""
    generator = torch.Generator().manual_seed(0)
    rows, k, vocab = 4000, 3, 5
    p = torch.rand(rows, k + 1, vocab, generator=generator, dtype=torch.float64)
    q = torch.rand(rows, k, vocab, generator=generator, dtype=torch.float64)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.randint(-1, vocab, (rows, k), generator=generator)
    accept, final, other_accept, other_final = (
        torch.rand(rows, width, generator=generator, dtype=torch.float64) for width in (k, k + 1, k, k + 1)
    )
    verdict = verify_chain_sampled(tokens, q, p, accept, final)
    last = verdict.accept_lens[:, None] - 1
    used_accept, used_final = torch.arange(k) <= last, torch.arange(k + 1) == last
    again = verify_chain_sampled(
        tokens, q, p, torch.where(used_accept, accept, other_accept), torch.where(used_final, final, other_final)
    )
    assert torch.equal(again.emitted, verdict.emitted)
    assert len(set(verdict.accept_lens.tolist())) == k + 1


def test_greedy_chains_keep_the_leading_run() -> None:
    """All drafts over three ids, and none, against all choices: what is kept is the longest run from the front."""
    k = 3
    drafts = torch.cartesian_prod(*[torch.arange(-1, 3)] * k)
    choices = torch.cartesian_prod(*[torch.arange(3)] * (k + 1))
    drafts, choices = drafts.repeat_interleave(len(choices), 0), choices.repeat(len(drafts), 1)
    verdict = verify_chain_greedy(drafts, choices)
    check_verdict(verdict)
    for draft, choice, length in zip(drafts.tolist(), choices.tolist(), verdict.accept_lens.tolist(), strict=True):
        run = next((place for place in range(k) if draft[place] != choice[place]), k)
        assert length == run + 1
    kept = torch.arange(k + 1) < verdict.accept_lens[:, None]
    assert torch.equal(verdict.emitted, torch.where(kept, choices, -1))


@pytest.mark.parametrize("with_probs", [True, False])
def test_nan_never_becomes_an_id(with_probs: bool) -> None:
    p = torch.full((2, 3, 4), float("nan"))
    p[1, 0] = 0.25
    q = torch.full((2, 2, 4), float("nan")) if with_probs else None
    draft = torch.tensor([[3, 1], [2, 0]])
    verdict = verify_chain_sampled(draft, q, p, torch.full((2, 2), 0.1), torch.full((2, 3), 0.9))
    check_verdict(verdict)
    assert int(verdict.emitted.max()) < 4
