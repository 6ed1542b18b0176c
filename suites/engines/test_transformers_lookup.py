"""The transformers adapter with prompt lookup: the closed form of NGRAM is its, and what it does otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.contract import Completion, DrafterSetup, Engine, Request, Run, SamplingParams
from harness.invariants import accept_1
from harness.known_answer.drafters.ngram import look_up
from harness.workloads.acceptance import deserved, deserved_drafts
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.random_checkpoints import encode, random_checkpoint
from harness.workloads.scenarios import repeats
from suites.engines.conftest import Start
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=8, stage="cpu", needs="cpu")

K = 3
LOOKUP = DrafterSetup.chain("NGRAM", K, prompt_lookup_min=1, prompt_lookup_max=3)
(A,) = encode("a")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(scope="module")
def plain(start: Start, target: Path) -> Engine:
    return start(target)


@pytest.fixture(scope="module")
def engine(start: Start, target: Path) -> Engine:
    return start(target, LOOKUP)


def only(engine: Engine, prompt: str, hidden: bool = False, **sampling: Any) -> Completion:
    params = SamplingParams(**{"max_new_tokens": 24, "ignore_eos": True, **sampling})
    request = Request(request_id="r", prompt_token_ids=encode(prompt), sampling=params, return_hidden_states=hidden)
    (completion,) = engine.run([request]).completions
    return completion


def a_s(engine: Engine, prompt: str, **sampling: Any) -> Completion:
    """A request whose text is "aaa...", whatever its prompt is."""
    return only(engine, prompt, logit_bias=((A, 1e4),), **sampling)


@pytest.mark.parametrize("family", ["walk", "census-stutter"])
@pytest.mark.parametrize("k", tiered([1, K, 5], K))
def test_the_closed_form_of_ngram_is_its(tmp_path: Path, family: str, k: int) -> None:
    lane = Lane("transformers", LANES["NGRAM"], tmp_path)
    run = lane.run_batch(replace(repeats(vocabulary(family)), k=k), family=family)
    drafter = lane.drafter(family)
    assert accept_1(run, deserved(run, drafter), deserved_drafts(run, drafter)) == []


def test_texts_are_those_without_drafts(plain: Engine, engine: Engine) -> None:
    for prompt in ("Hello, Hello, He", "abcabcab", "0123456789"):
        done = only(engine, prompt, logprobs=1, prompt_logprobs=1)
        alone = only(plain, prompt, logprobs=1, prompt_logprobs=1)
        assert (done.token_ids, done.text, done.finish_reason) == (alone.token_ids, alone.text, alone.finish_reason)
        assert done.accept_lens is not None
        assert sum(done.accept_lens) == 24
        for left, right in zip(done.logprobs or (), alone.logprobs or (), strict=True):
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)


def test_sampled_requests_speculate_and_repeat_by_seed(engine: Engine) -> None:
    asked = {"temperature": 0.7, "seed": 4, "logit_bias": ((A, 30.0),)}
    first, second = only(engine, "xaaaa", **asked), only(engine, "xaaaa", **asked)
    assert first.token_ids == second.token_ids
    assert first.accept_lens is None or max(first.accept_lens) > 1


@pytest.mark.parametrize(("cap", "drafts"), [(1, (0,)), (2, (3,)), (5, (3, 0)), (6, (3, 3))])
def test_drafts_are_not_cut_at_the_cap_and_none_is_made_for_the_last_token(
    engine: Engine, cap: int, drafts: tuple[int, ...]
) -> None:
    done = a_s(engine, "xaaaaaa", max_new_tokens=cap)
    assert (done.token_ids, done.finish_reason, done.draft_lens) == ((A,) * cap, "length", drafts)
    assert done.accept_lens == tuple(count + 1 for count in drafts)


def test_neither_a_stop_id_nor_anything_behind_it_is_drafted(engine: Engine) -> None:
    prompt = "abcdab"
    assert look_up(encode(prompt), K, 1, 3) == encode("cda")
    for stop, drafts in (("z", 3), ("a", 2), ("d", 1), ("c", 0)):
        done = only(engine, prompt, max_new_tokens=2, stop_token_ids=encode(stop))
        assert done.draft_lens is not None
        assert done.draft_lens[0] == drafts, stop


def test_a_stop_string_inside_a_block(plain: Engine, engine: Engine) -> None:
    """transformers 5.24 looks for stop strings where a block ends; a version that mends it passes as well."""
    assert a_s(plain, "aaab", stop=("aa",)).token_ids == (A, A)
    done = a_s(engine, "aaab", stop=("aa",))
    assert done.finish_reason == "stop"
    assert done.draft_lens is not None
    assert done.draft_lens[1] == K
    assert len(done.token_ids) in (2, 4)


def test_a_stop_string_that_ends_before_its_block_does(tmp_path: Path) -> None:
    """transformers 5.24 goes on to the cap; a version that mends it passes as well."""
    lane, words = Lane("transformers", LANES["NGRAM"], tmp_path), vocabulary("walk")
    (request,) = [one for one in repeats(words).requests if one.prompt_token_ids[:3] == (21, 37, 11)]
    (free,) = lane.run([request], family="walk", k=K).completions
    assert free.accept_lens is not None
    assert free.accept_lens[:2] == (K + 1, K + 1)
    # The fourth and the fifth token; a block ends behind the eighth.
    stopped = replace(request, sampling=replace(request.sampling, stop=(words.text(free.token_ids[3:5]),)))
    alone, done = (lane.run([stopped], family="walk", k=K, speculative=arm).completions[0] for arm in (False, True))
    assert (alone.token_ids, alone.finish_reason) == (free.token_ids[:5], "stop")
    assert (done.token_ids, done.finish_reason, done.text) in (
        (alone.token_ids, "stop", alone.text),
        (free.token_ids, "length", free.text),
    )


def test_hidden_rows_of_the_first_block(plain: Engine, engine: Engine) -> None:
    """As with a draft model: transformers 5.24 gives rows of the prompt for drafts accepted in the first forward."""
    prompt, asked = "xaaaa", {"hidden": True, "logit_bias": ((A, 1e4),), "max_new_tokens": 8}
    alone, done = only(plain, prompt, **asked).hidden_states, only(engine, prompt, **asked).hidden_states
    assert alone is not None
    assert done is not None
    torch.testing.assert_close(done.prefill, alone.prefill, atol=1e-4, rtol=0)
    pairs = zip(done.decode, alone.decode, strict=True)
    wrong = {row for row, (got, right) in enumerate(pairs) if not torch.allclose(got, right, atol=1e-4, rtol=0)}
    assert wrong <= set(range(K))
    for row in wrong:
        torch.testing.assert_close(done.decode[row], done.prefill[row], atol=0, rtol=0)


def test_top_p_takes_drafts_away(tmp_path: Path) -> None:
    """transformers 5.24 asks the processors whether a draft is forbidden with logits that are all equal. `top_p` keeps
    but a part of those, so drafts are dropped by their number alone; a version that asks otherwise passes as well."""
    lane = Lane("transformers", LANES["NGRAM"], tmp_path)
    batch = repeats(vocabulary("walk"))

    def drafted(**sampling: Any) -> tuple[Run, int]:
        hot = [replace(request.sampling, temperature=1.0, seed=1, **sampling) for request in batch.requests]
        requests = [replace(request, sampling=one) for request, one in zip(batch.requests, hot, strict=True)]
        run = lane.run(requests, family="walk", k=K)
        return run, sum(sum(done.draft_lens or ()) for done in run.completions)

    (whole, all_), (cut, fewer) = drafted(), drafted(top_p=0.5)
    assert [one.token_ids for one in whole.completions] == [one.token_ids for one in cut.completions]
    assert fewer <= all_
