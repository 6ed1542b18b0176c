"""The transformers adapter with a STANDALONE drafter: lossless tokens, and accept lengths read off without patching."""

from __future__ import annotations

import shutil
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from harness.contract import Completion, DrafterSetup, Engine, Request, SamplingParams
from harness.invariants import accept_1
from harness.workloads.acceptance import deserved
from harness.workloads.known import vocabulary
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.random_checkpoints import EOS_TOKEN_ID, encode, random_checkpoint
from harness.workloads.scenarios import short_prompts
from suites.engines.conftest import Start
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=6.1, stage="cpu", needs="cpu")

K = 3
PROMPTS = ("Hello, world", "a", "def f(x):", "0123456789 9876543210")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(scope="module")
def noisy(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its head: right often, wrong often."""
    directory = tmp_path_factory.mktemp("noisy")
    shutil.copytree(target, directory, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    noise = torch.randn(tensors["lm_head.weight"].shape, generator=torch.Generator().manual_seed(5))
    tensors["lm_head.weight"] += 0.05 * noise
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def plain(start: Start, target: Path) -> Engine:
    return start(target)


def model(draft: Path, k: int = K, **extra: Any) -> DrafterSetup:
    return DrafterSetup.chain("STANDALONE", k, draft, **extra)


def requests(**sampling: Any) -> list[Request]:
    params = SamplingParams(**{"max_new_tokens": 24, **sampling})
    return [Request(request_id=text, prompt_token_ids=encode(text), sampling=params) for text in PROMPTS]


def test_drafter_equal_to_target_is_always_accepted(start: Start, plain: Engine, target: Path) -> None:
    asked = requests(ignore_eos=True, logprobs=1)
    for alone, done in zip(
        plain.run(asked).completions, start(target, model(target)).run(asked).completions, strict=True
    ):
        assert done.token_ids == alone.token_ids
        assert done.draft_lens == (K,) * 6
        assert done.accept_lens == (K + 1,) * 6
        assert done.logprobs is not None
        assert alone.logprobs is not None
        for left, right in zip(done.logprobs, alone.logprobs, strict=True):
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)


@pytest.mark.parametrize("family", ["walk", "walk-perfect"])
def test_it_drafts_when_and_as_much_as_it_claims(tmp_path: Path, family: str) -> None:
    """Before the prompt has run, and never past the cap: then accept lengths follow from the weights."""
    lane = Lane("transformers", LANES["STANDALONE"], tmp_path)
    run = lane.run_batch(short_prompts(vocabulary(family)), family=family)
    assert run.capabilities.drafts_with_prefill
    assert run.capabilities.drafts_within_cap
    assert accept_1(run, deserved(run, lane.drafter(family))) == []
    for done in run.completions:
        assert done.accept_lens is not None
        assert sum(done.accept_lens) == done.usage.completion_tokens


def test_an_emitted_eos_does_not_blind_the_drafter(start: Start, target: Path) -> None:
    """transformers masks pad ids out of what its drafter sees: the adapter must not name an id that may be emitted."""
    prompt = (*encode("He"), EOS_TOKEN_ID, *encode("llo"))
    request = Request(
        request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(max_new_tokens=12, ignore_eos=True)
    )
    (done,) = start(target, model(target)).run([request]).completions
    assert done.accept_lens == (K + 1,) * 3


@pytest.mark.parametrize("k", tiered([1, K, 6], K))
def test_a_noisy_drafter_is_lossless_and_partly_accepted(
    start: Start, plain: Engine, target: Path, noisy: Path, k: int
) -> None:
    asked = requests(ignore_eos=True)
    done = start(target, model(noisy, k)).run(asked).completions
    assert [one.token_ids for one in done] == [one.token_ids for one in plain.run(asked).completions]
    accepted = [length for one in done for length in one.accept_lens or ()]
    assert {1, k + 1} <= set(accepted)
    for one in done:
        assert one.accept_lens is not None
        assert one.draft_lens is not None
        assert sum(one.accept_lens) == one.usage.completion_tokens
        assert all(
            1 <= length <= 1 + drafts <= k + 1 for length, drafts in zip(one.accept_lens, one.draft_lens, strict=True)
        )


def test_accept_lengths_do_not_depend_on_where_a_stop_cuts_the_block(
    start: Start, plain: Engine, target: Path, noisy: Path
) -> None:
    (free,) = plain.run(requests(ignore_eos=True)[:1]).completions
    engine = start(target, model(noisy))
    (whole,) = engine.run(requests(ignore_eos=True)[:1]).completions
    assert whole.accept_lens is not None
    ends = list(accumulate(whole.accept_lens))
    cut_inside = 0
    for position, stop in enumerate(free.token_ids[:16]):
        if free.token_ids.index(stop) != position:
            continue
        (done,) = engine.run(requests(ignore_eos=True, stop_token_ids=(stop,))[:1]).completions
        assert (done.token_ids, done.finish_reason) == (free.token_ids[: position + 1], "stop")
        steps = next(step for step, end in enumerate(ends) if end > position) + 1
        # A drafter that proposes the stop token itself ends its draft there, and so the accept length.
        drafted_stop = done.draft_lens is not None and done.draft_lens[-1] < K
        expected = list(whole.accept_lens[:steps])
        if drafted_stop:
            expected[-1] = position + 1 - (ends[steps - 2] if steps > 1 else 0) + 1
        assert done.accept_lens is not None
        assert list(done.accept_lens) == expected
        cut_inside += position + 1 not in ends
    assert cut_inside >= 3


def test_sampled_requests_repeat_by_seed_and_speculate(start: Start, target: Path, noisy: Path) -> None:
    engine = start(target, model(noisy, draft_sample_method="probabilistic"))
    asked = requests(ignore_eos=True, temperature=0.7, seed=4, n=2)
    first, second = engine.run(asked).completions, engine.run(asked[::-1]).completions
    assert {(one.request_id, one.index): one.token_ids for one in first} == {
        (one.request_id, one.index): one.token_ids for one in second
    }
    known = [one.accept_lens for one in first if one.accept_lens is not None]
    assert len(known) >= 4
    assert any(length > 1 for lens in known for length in lens)


def first_block(completion: Completion) -> set[int]:
    """Decode rows of the draft tokens that the first forward accepted."""
    assert completion.accept_lens is not None
    return set(range(completion.accept_lens[0] - 1))


def test_hidden_rows_of_assisted_generation(start: Start, plain: Engine, target: Path) -> None:
    """transformers 5.24 hands out rows of the prompt for the drafts accepted in the first forward; the rest is right.

    The adapter delivers what came, so that the harness can find this; a version that mends it passes as well.
    """
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    request = Request(request_id="r", prompt_token_ids=encode(PROMPTS[0]), sampling=params, return_hidden_states=True)
    (alone,) = plain.run([request]).completions
    (done,) = start(target, model(target)).run([request]).completions
    assert alone.hidden_states is not None
    assert done.hidden_states is not None
    assert done.hidden_states.num_entries == alone.hidden_states.num_entries == 12
    torch.testing.assert_close(done.hidden_states.prefill, alone.hidden_states.prefill, atol=1e-4, rtol=0)
    pairs = zip(done.hidden_states.decode, alone.hidden_states.decode, strict=True)
    wrong = {row for row, (got, right) in enumerate(pairs) if not torch.allclose(got, right, atol=1e-4, rtol=0)}
    assert wrong in (set(), first_block(done))
    for row in wrong:
        torch.testing.assert_close(done.hidden_states.decode[row], done.hidden_states.prefill[row], atol=0, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_of_the_drafts(target: Path, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 divides the logits of a drafter by the temperature twice, those of the target once.

    It verifies with the law that it really drafted from, so the output keeps its distribution and only acceptance
    suffers; a version that divides once passes as well. Powers of two divide exactly.
    """
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(target) for _ in range(2)]
    verifier, drafter = models
    drafter.generation_config = GenerationConfig(num_assistant_tokens=K, num_assistant_tokens_schedule="constant")
    generate, drafted = drafter.generate, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        drafted.append(generate(*args, **kwargs))
        return drafted[-1]

    monkeypatch.setattr(drafter, "generate", watched)
    config = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        done = verifier.generate(torch.tensor([encode("Hello")]), generation_config=config, assistant_model=drafter)
    assert divisions([done], temperature) == {1}
    assert divisions(drafted, temperature) in ({1}, {2})


def divisions(outputs: list[Any], temperature: float) -> set[int]:
    """How often the raw logits of each position were divided by the temperature to give its scores."""
    pairs = [pair for output in outputs for pair in zip(output.logits, output.scores, strict=True)]
    assert pairs
    return {next(times for times in range(4) if torch.equal(scores, raw / temperature**times)) for raw, scores in pairs}
