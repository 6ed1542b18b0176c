"""The checkpoints in transformers: loaded without complaint, and every answer as known."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, logging

from harness.known_answer.census import LAG
from suites.known_answer.support import DTYPES
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=1, stage="cpu", needs="cpu")

logging.disable_progress_bar()

CASES = [(name, dtype) for dtype in DTYPES for name in ("walk", "law", "census")]


def load(directory, dtype):
    model, report = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype], output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@torch.inference_mode()
def observe(model, tokens):
    """Final-norm rows and logprobs of a whole sequence, float64."""
    rows = model.model(torch.tensor([tokens])).last_hidden_state[0]
    return rows.double(), model.lm_head(rows).double().log_softmax(-1)


def generate(model, prompt, n):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, eos_token_id=None)
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize(("name", "dtype"), tiered(CASES, *CASES[:3], ("census", "bfloat16")))
def test_greedy_tokens_logprobs_and_rows(families, checkpoints, name, dtype):
    target = families(name, dtype).target
    model = load(checkpoints(name, dtype) / "target", dtype)
    for length, owner in ((1, 1), (11, 2)):
        prompt = target.prompt(length, seed=1, owner=owner)
        tokens = prompt + generate(model, prompt, 24)
        assert tokens == prompt + target.greedy(prompt, 24)
        if dtype == "bfloat16" and name == "census":
            continue
        rows, logprobs = observe(model, tokens)
        # A constant of 63 in census rows is known to 4e-6 in float32.
        assert (rows - target.hidden_rows(tokens)).abs().max() < 1e-5
        known = torch.stack([target.logprobs(tokens[: end + 1]) for end in range(len(tokens))])
        assert (logprobs - known).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_census_at_300_tokens(families, checkpoints, dtype):
    target = families("census", dtype).target
    model = load(checkpoints("census", dtype) / "target", dtype)
    tokens = target.prompt(5, seed=4, owner=0)
    tokens += target.greedy(tokens, 295)
    rows, logprobs = observe(model, tokens)
    assert tuple(logprobs.argmax(-1)[4:-1].tolist()) == tokens[5:]
    counts: Counter[int] = Counter()
    for place, token in enumerate(tokens):
        counts[token] += 1
        reading = target.decode_row(rows[place], place)
        assert (reading.token, reading.counts, reading.owner) == (token, counts, 0)
        assert reading.lagged == tokens[max(0, place - LAG)]
        assert reading.error < (1e-5 if dtype == "float32" else 0.25)


@pytest.mark.parametrize("name", ["walk", "census"])
def test_standalone_drafter_is_a_model_of_its_own(families, checkpoints, name):
    drafter = families(name, "float32").drafters["standalone"]
    model = load(checkpoints(name, "float32") / "standalone", "float32")
    prompt = drafter.target.prompt(9, seed=5, owner=3)
    assert generate(model, prompt, 24) == drafter.draft(prompt, 24)


@pytest.mark.parametrize("name", ["walk", "census"])
def test_mtp_target_is_a_qwen2_model(families, checkpoints, name):
    """The MTP layers are the only tensors that Qwen2 does not know."""
    directory = checkpoints(name, "float32") / "mtp"
    target = families(name, "float32").target
    config = Qwen2Config(**families(name, "float32").drafters["mtp"].config)
    model, report = Qwen2ForCausalLM.from_pretrained(directory, config=config, output_loading_info=True)
    assert not report["missing_keys"]
    assert all(key.startswith("model.mtp_layers.") for key in report["unexpected_keys"])
    prompt = target.prompt(9, seed=5, owner=3)
    assert generate(model.eval(), prompt, 24) == target.greedy(prompt, 24)


def test_tokenizer_loads(checkpoints):
    tokenizer = AutoTokenizer.from_pretrained(checkpoints("walk", "float32") / "target")
    text = '{"a": [1.5e-3, true]}'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (2, 64)
