"""The committed checkpoints: what the training code computes is what engines compute, and the drafters are worth it."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harness.contract import Request, Run, SamplingParams
from harness.engines import engine_factory
from harness.trained import checkpoints
from harness.trained.feature import FeatureDrafter
from harness.trained.measure import LEAST
from harness.trained.mtp import Mtp
from harness.trained.target import Lesson
from harness.trained.text import ALPHABET, prompts
from suites.registration import suite

suite(seconds=4.1, stage="cpu", needs="cpu")

K, NUM_PROMPTS, NUM_TOKENS = 3, 10, 48
PROMPT = prompts(1)[0]
MOST_BYTES = 20_000_000
FEATURES = ("eagle", "eagle3", "mtp")


@cache
def target() -> torch.nn.Module:
    return checkpoints.target()


@cache
def run(folder: str | None) -> Run:
    """Greedy, in one batch."""
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    asked = [
        Request(request_id=str(index), prompt_token_ids=ids, sampling=sampling)
        for index, ids in enumerate(prompts(NUM_PROMPTS))
    ]
    engine = engine_factory("reference").start(checkpoints.setup(folder, K))
    try:
        return engine.run(asked)
    finally:
        engine.close()


def lesson(ids: tuple[int, ...]) -> Lesson:
    taught: Lesson = target()(torch.tensor([ids]))
    return taught


def simulated(drafts: list[list[int]], ids: tuple[int, ...], prompt_len: int) -> tuple[int, ...]:
    """Accept length of every verify step of a text, whose row p drafts what follows ids 0..p + 1: as long as the drafts
    can be held against the text."""
    lens, done = [], prompt_len + 1
    while done + K < len(ids):
        row, accepted = drafts[done - 2], 0
        while accepted < K and row[accepted] == ids[done + accepted]:
            accepted += 1
        lens.append(accepted + 1)
        done += accepted + 1
    return tuple(lens)


def test_files_are_as_their_checksums_say() -> None:
    assert checkpoints.damaged() == []
    assert sum(path.stat().st_size for path in checkpoints.WEIGHTS.rglob("*")) < MOST_BYTES


@pytest.mark.parametrize("folder", ["target", *checkpoints.DRAFTERS])
def test_weights_have_the_dtype_that_the_config_names(folder: str) -> None:
    config = json.loads((checkpoints.WEIGHTS / folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(checkpoints.WEIGHTS / folder / "model.safetensors")
    assert config["torch_dtype"] == "bfloat16"
    assert {tensor.dtype for name, tensor in weights.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}


@pytest.mark.parametrize("folder", ["target", "standalone"])
def test_logits_equal_those_of_transformers(folder: str) -> None:
    ours = target() if folder == "target" else checkpoints.drafter(folder)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoints.WEIGHTS / folder, dtype=torch.float32)
    ids = torch.tensor([prompt[:16] for prompt in prompts(4)])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("folder", [None, "mtp"])
def test_logprobs_equal_those_of_the_reference_engine(folder: str | None) -> None:
    """The target alone, and as it lies in the checkpoint that holds the MTP layer."""
    for done in run(folder).completions:
        ids = (*done.prompt_token_ids, *done.token_ids)
        expected = lesson(ids).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
        assert done.prompt_logprobs is not None
        assert done.logprobs is not None
        rows = [*done.prompt_logprobs[1:], *done.logprobs]
        found = torch.tensor([row.logprob for row in rows if row is not None])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("folder", FEATURES)
def test_the_engine_accepts_what_training_says(folder: str) -> None:
    """Per request and step, exactly: the unrolled steps of training are the draft steps of an engine."""
    drafter = checkpoints.drafter(folder)
    assert isinstance(drafter, FeatureDrafter)
    for done in run(folder).completions:
        ids = (*done.prompt_token_ids, *done.token_ids)
        expected = simulated(drafter.drafts(lesson(ids), K)[0].tolist(), ids, len(done.prompt_token_ids))
        assert done.accept_lens is not None
        assert len(expected) >= NUM_TOKENS // (K + 1) - 1
        assert done.accept_lens[: len(expected)] == expected


def test_the_engine_accepts_what_the_draft_model_says() -> None:
    drafter = checkpoints.drafter("standalone")
    done = run("standalone").completions[0]
    ids = (*done.prompt_token_ids, *done.token_ids)
    drafts: list[list[int]] = []
    for row in range(len(ids) - 1):
        tokens = list(ids[: row + 2])
        for _ in range(K):
            tokens.append(int(drafter(torch.tensor([tokens])).logits[0, -1].argmax()))
        drafts.append(tokens[-K:])
    expected = simulated(drafts, ids, len(done.prompt_token_ids))
    assert done.accept_lens is not None
    assert done.accept_lens[: len(expected)] == expected


@pytest.mark.parametrize("folder", LEAST)
def test_accept_length(folder: str) -> None:
    counters = run(folder).counters
    assert counters is not None
    assert counters.num_drafts >= NUM_PROMPTS * (NUM_TOKENS - 1) // (K + 1)
    assert 1 + counters.num_accepted_tokens / counters.num_drafts >= LEAST[folder]


def test_the_mtp_layer_does_without_the_embedding_at_position_0() -> None:
    """vLLM feeds zeros there, as training does in the first of its windows: accept lengths stay within 2 %."""
    drafter = checkpoints.drafter("mtp")
    assert isinstance(drafter, Mtp)
    steps, lens = [], []
    for zeroed in (False, True):
        drafter.train(zeroed)
        seen: list[int] = []
        for done in run("mtp").completions:
            ids = (*done.prompt_token_ids, *done.token_ids)
            seen += simulated(drafter.drafts(lesson(ids), K)[0].tolist(), ids, len(done.prompt_token_ids))
        steps.append(len(seen))
        lens.append(sum(seen) / len(seen))
    assert min(steps) > NUM_PROMPTS * (NUM_TOKENS // (K + 1) - 2)
    assert lens[1] == pytest.approx(lens[0], rel=0.02)


def test_greedy_text_is_text() -> None:
    """With every drafter the same, of ids that the text holds."""
    plain = [done.token_ids for done in run(None).completions]
    assert {token for ids in plain for token in ids} <= set(ALPHABET)
    for folder in LEAST:
        assert [done.token_ids for done in run(folder).completions] == plain
