"""LAW: what no law allows is red at its place, a stream that comes twice is not two samples, and misfits are named."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from harness.contract import Request, Run, SamplingParams
from harness.invariants import Misuse, Violation, law_1, law_2, law_3, law_3_independent
from harness.invariants.blocks import PREFILL, Place, places
from harness.oracles.evidence import Evidence
from suites.registration import suite

from .builders import assert_red, completion, good_run, request, step
from .builders import law as builders_law
from .sampled import LAWS, Fault, ask, complete, honest, law, moved, run_of, sampled_run

suite(seconds=1.4, stage="cpu", needs="cpu")


def strict(asked: Request, output: tuple[int, ...]) -> Any:
    """Only the two likeliest tokens."""
    scores = builders_law((*asked.prompt_token_ids, *output)).exp().numpy()
    return np.where(scores >= np.sort(scores)[-2], scores, 0.0)


def test_places_name_accepted_recovered_and_bonus_tokens() -> None:
    """a: one token from the prefill, blocks of 3, 1 and 4 of which the last is cut by one."""
    run = good_run()
    assert places(run, run.of("a")) == (
        PREFILL,
        Place(0, 0, "accepted"),
        Place(0, 1, "accepted"),
        Place(0, 2, "recovered"),
        Place(1, 0, "recovered"),
        Place(2, 0, "accepted"),
        Place(2, 1, "accepted"),
        Place(2, 2, "accepted"),
    )
    assert places(run, run.of("b"))[-1] == Place(1, 2, "accepted")
    whole = completion("b", token_ids=(11, 10, 5, 12, 15, 14, 9))(run)
    assert places(whole, whole.of("b"))[-1] == Place(1, 3, "bonus")
    assert places(run, replace(run.of("a"), accept_lens=None)) == ()
    assert places(run, replace(run.of("a"), accept_lens=(1,), draft_lens=(3,))) == ()


def test_law_1_names_the_token_that_could_not_come() -> None:
    run = good_run()
    assert law_1(run, strict) == []
    found = law_1(completion("b", token_ids=(11, 10, 0, 12, 15, 14))(run), strict)
    where = {"request_id": "b", "row": 2, "position": 7, "got": 0, "expected": "one of [5, 6]"}
    assert_red(found, "LAW-1", "probability zero", **where)
    assert "place 1 of the block of verify step 0 (recovered)" in str(found[0].origin)


@pytest.mark.parametrize("token_id", [-1, 16])
def test_law_1_is_red_outside_the_vocabulary(token_id: int) -> None:
    assert_red(law_1(completion("a", token_ids=(token_id,) * 8)(good_run()), strict), "LAW-1", "zero", got=token_id)


def test_law_1_judges_what_was_accepted_behind_the_end() -> None:
    """The last token of b's last block was cut by its cap: with another in its place nothing delivered changes."""
    run = good_run()
    assert run.steps[2].verify is not None
    emitted = run.steps[2].verify.emitted.clone()
    row = next(i for i, owner in enumerate(run.steps[2].verify.request_ids) if owner.startswith("b"))
    emitted[row, 3] = 0
    found = law_1(step(2, "verify", emitted=emitted)(run), strict)
    assert_red(found, "LAW-1", "probability zero", request_id="b", row=6, got=0)
    assert "behind the end" in str(found[0].origin)


def seeded(**changes: Any) -> Run:
    requests = (request("a", (1, 2, 3), temperature=1.0, seed=5), request("b", (4, 5, 6, 7, 8), max_new_tokens=6))
    return replace(good_run(requests), **changes)


def test_law_3_is_red_when_a_seed_gives_something_else() -> None:
    run = seeded()
    assert law_3(run, seeded(), name="again") == []
    other = (*run.of("a").token_ids[:4], 0, *run.of("a").token_ids[5:])
    found = law_3(run, completion("a", token_ids=other)(run), name="alone")
    assert_red(found, "LAW-3", "tokens differ from the alone", request_id="a", row=4, expected=0)
    lens = completion("a", accept_lens=(4, 4))(run)
    assert law_3(run, lens) == []
    assert_red(law_3(run, lens, accept_lens=True), "LAW-3", "accept_lens differ", request_id="a")


def test_law_3_leaves_greedy_requests_to_others_and_wants_a_seeded_one() -> None:
    run = seeded()
    assert law_3(run, completion("b", token_ids=(11, 10, 5, 12, 15, 0))(run)) == []
    with pytest.raises(Misuse, match="no sampled request with a seed"):
        law_3(good_run(), good_run())


TELLING = (1, 2, 0, 1, 2, 1, 2, 0, 2, 1, 2, 0)


def twins(one: tuple[int, ...], other: tuple[int, ...], **sampling: Any) -> Run:
    requests = tuple(ask(name, len(one), **sampling) for name in ("one", "other"))
    return run_of(requests, tuple(complete(r, tokens) for r, tokens in zip(requests, (one, other), strict=True)))


def test_copies_without_a_seed_go_their_own_ways() -> None:
    """Probability of the stream: 1.6e-4. Sharing 11 tokens of it, which have 2.4e-4, tells at 1e-3 and not at 2e-4."""
    parted = (*TELLING[:-1], 1)
    different = (2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1)
    assert law_3_independent(twins(TELLING, different), law, alpha=1e-3) == []
    found = law_3_independent(twins(TELLING, TELLING), law, alpha=1e-3)
    assert_red(found, "LAW-3", "begin with the same", request_id="one")
    assert "'other'" in str(found[0].origin)
    assert law_3_independent(twins(TELLING, parted), law, alpha=1e-3)
    chance = float(np.prod([LAWS[a][b] for a, b in zip((0, *TELLING), TELLING, strict=False)]))
    assert law_3_independent(twins(TELLING, parted), law, alpha=1.0001 * chance) == []
    with pytest.raises(Misuse, match="too likely"):
        law_3_independent(twins(TELLING, TELLING), law, alpha=1e-9)
    with pytest.raises(Misuse, match="nothing to compare"):
        law_3_independent(twins(TELLING, TELLING, seed=1), law, alpha=1e-3)


def test_samples_of_one_request_are_independent_with_a_seed_too() -> None:
    several = ask("several", len(TELLING), seed=1, n=2)
    done = complete(several, TELLING)
    run = run_of((several,), (done, replace(done, index=1)))
    assert_red(law_3_independent(run, law, alpha=1e-3), "LAW-3", "begin with the same", request_id="several")


def test_independent_copies_are_not_failed_more_often_than_stated() -> None:
    """alpha = 0.1 and 400 pairs: at most 70 alarms, but for one session in a million."""
    rng = np.random.default_rng(5)
    alarms = 0
    for _ in range(400):
        one, other = (sampled_run(rng, 12).completions[0].token_ids for _ in range(2))
        alarms += bool(law_3_independent(twins(one, other), law, alpha=0.1))
    assert 0 < alarms <= 70


ALPHA = 1e-6
RUNS, TOKENS = 90, 50


def judged(fault: Fault, seed: int = 0, num_runs: int = RUNS, **changes: Any) -> list[Violation]:
    rng = np.random.default_rng(seed)
    runs = (sampled_run(rng, TOKENS, fault, request_id=f"plain/{i}") for i in range(num_runs))
    return law_2(runs, law, partial(Evidence, 60.0), **{"alpha": ALPHA, "num_tests": 6, **changes})


def in_place(wanted: int) -> Fault:
    return lambda _kind, place, right: moved(right, 0.15) if place == wanted else right


def in_recovered(kind: str, _place: int, right: Any) -> Any:
    return moved(right, 0.15) if kind == "recovered" else right


FAULTS: dict[str, tuple[Fault, str]] = {
    "first": (in_place(0), "place 0 of the block"),
    "middle": (in_place(1), "place 1 of the block"),
    "bonus": (in_place(2), "place 2 of the block"),
    "recovered": (in_recovered, "recovered tokens"),
}


def test_law_2_is_green_on_an_honest_sampler() -> None:
    assert [judged(honest, seed) for seed in range(2)] == [[], []]


@pytest.mark.parametrize("name", FAULTS)
def test_law_2_names_the_place_of_an_error(name: str) -> None:
    """0.15 in total variation, 4500 tokens; the error of 0.02 that the full tier finds is in `test_law_power`."""
    fault, says = FAULTS[name]
    found = judged(fault)
    assert_red(found, "LAW-2", says)
    assert not [violation for violation in found if "place" in violation.message and says not in violation.message]
    assert "was due" in str(found[0].origin)


def test_law_2_blames_the_control_arm_first() -> None:
    control = judged(in_place(0))
    found = judged(honest, control=control)
    assert_red(found, "LAW-2", "the control arm, without speculation, fails: not the fault of speculation")
    assert len(found) == len(control)


def test_law_2_counts_its_tests_and_wants_samples() -> None:
    with pytest.raises(Misuse, match="num_tests=3: 6 were made"):
        judged(honest, num_runs=10, num_tests=3)
    greedy = run_of((replace(ask("g", 1), sampling=SamplingParams(max_new_tokens=1)),), (complete(ask("g", 1), (1,)),))
    with pytest.raises(Misuse, match="no sampled token"):
        law_2([greedy], law, Evidence, ALPHA, 6)


def test_law_2_is_red_on_a_token_of_probability_zero() -> None:
    run = sampled_run(np.random.default_rng(0), 50)
    found = law_2([completion("plain/0", token_ids=(3,) * 50)(run)], law, Evidence, ALPHA, 6)
    assert_red(found, "LAW-2", "requests 'plain'", got="inf after 50 tokens")
