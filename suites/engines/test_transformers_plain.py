"""The transformers adapter without a drafter: what it delivers against a cache-less greedy loop written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.contract import Completion, DType, Engine, Request, SamplingParams
from harness.workloads.random_checkpoints import EOS_TOKEN_ID, Architecture, encode, random_checkpoint
from suites.engines.conftest import Start
from suites.registration import suite

suite(seconds=2.7, stage="cpu", needs="cpu")

TOLERANCE: dict[DType, float] = {"float32": 1e-4, "float64": 1e-9}


@pytest.fixture(scope="module", params=get_args(Architecture))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("llama"), seed=0)


@pytest.fixture(scope="module")
def engine(start: Start, llama: Path) -> Engine:
    return start(llama)


def ask(text: str, *, name: str = "r", hidden: bool = False, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_new_tokens": 12, **sampling})
    return Request(request_id=name, prompt_token_ids=encode(text), sampling=params, return_hidden_states=hidden)


def only(engine: Engine, request: Request) -> Completion:
    (completion,) = engine.run([request]).completions
    return completion


@torch.no_grad()
def greedy_without_cache(
    directory: Path, dtype: DType, prompt: tuple[int, ...], count: int
) -> tuple[list[int], torch.Tensor, Any]:
    """Tokens of `count` whole forwards, the normed rows of all inputs in one forward, and the model."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
    return sequence[len(prompt) :], model.model(torch.tensor([sequence[:-1]])).last_hidden_state[0], model


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_greedy_tokens_logprobs_and_hidden_rows_equal_whole_forwards(
    start: Start, checkpoint: Path, dtype: DType
) -> None:
    request = ask("Hello, world", hidden=True, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    done = only(start(checkpoint, dtype=dtype), request)

    tokens, hidden, model = greedy_without_cache(checkpoint, dtype, request.prompt_token_ids, 12)
    assert list(done.token_ids) == tokens
    with torch.no_grad():
        expected = model.lm_head(hidden).double().log_softmax(-1)
    inputs = [*request.prompt_token_ids, *tokens]
    assert done.prompt_logprobs is not None
    assert done.logprobs is not None
    assert done.prompt_logprobs[0] is None
    rows = [*done.prompt_logprobs[1:], *done.logprobs]
    assert len(rows) == len(expected)
    for position, row in enumerate(rows):
        assert row is not None
        assert row.token_id == inputs[position + 1]
        assert row.logprob == pytest.approx(float(expected[position, row.token_id]), abs=TOLERANCE[dtype])
        assert row.rank == 1 + int((expected[position] > expected[position, row.token_id]).sum())
        best = expected[position].topk(len(row.top))
        assert [token for token, _ in row.top] == best.indices.tolist()
        assert [logprob for _, logprob in row.top] == pytest.approx(best.values.tolist(), abs=TOLERANCE[dtype])

    assert done.hidden_states is not None
    assert done.hidden_states.prefill.shape == (len(request.prompt_token_ids), 64)
    assert done.hidden_states.num_entries == done.usage.completion_tokens == 12
    got = torch.cat([done.hidden_states.prefill, torch.stack(done.hidden_states.decode)])
    torch.testing.assert_close(got, hidden, atol=TOLERANCE[dtype], rtol=0)


def test_bfloat16_runs_and_keeps_its_dtype(start: Start, llama: Path) -> None:
    done = only(start(llama, dtype="bfloat16"), ask("Hello", hidden=True, logprobs=0))
    assert done.hidden_states is not None
    assert done.hidden_states.prefill.dtype == torch.bfloat16
    assert done.logprobs is not None
    assert len(done.logprobs) == done.usage.completion_tokens


def test_a_stop_token_ends_the_request_and_is_delivered(engine: Engine) -> None:
    free = only(engine, ask("Hello", max_new_tokens=20, ignore_eos=True))
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    done = only(engine, ask("Hello", max_new_tokens=20, stop_token_ids=(stop,)))
    assert (done.token_ids, done.finish_reason) == (free.token_ids[: first + 1], "stop")
    assert free.text is not None
    assert done.text == free.text[:first]
    assert only(engine, ask("Hello", max_new_tokens=first + 1, stop_token_ids=(stop,))).finish_reason == "stop"
    assert only(engine, ask("Hello", max_new_tokens=first or 1, stop_token_ids=(stop,))).finish_reason == "length"


def test_eos_ends_unless_ignored(engine: Engine) -> None:
    biased = {"max_new_tokens": 6, "logit_bias": ((EOS_TOKEN_ID, 1e4),)}
    done = only(engine, ask("Hello", **biased))
    assert (done.token_ids, done.finish_reason, done.text) == ((EOS_TOKEN_ID,), "stop", "")
    done = only(engine, ask("Hello", ignore_eos=True, **biased))
    assert (done.token_ids, done.finish_reason) == ((EOS_TOKEN_ID,) * 6, "length")


def test_min_new_tokens_holds_exactly(engine: Engine) -> None:
    done = only(engine, ask("Hello", min_new_tokens=4, max_new_tokens=9, logit_bias=((EOS_TOKEN_ID, 1e4),)))
    assert EOS_TOKEN_ID not in done.token_ids[:4]
    assert (done.token_ids[4:], done.finish_reason) == ((EOS_TOKEN_ID,), "stop")


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_ends_the_request(engine: Engine, length: int) -> None:
    free = only(engine, ask("Hello", max_new_tokens=20))
    assert free.text is not None
    stop = free.text[5 : 5 + length]
    end = free.text.index(stop) + length
    done = only(engine, ask("Hello", max_new_tokens=20, stop=(stop, "never said")))
    assert (done.text, done.finish_reason) == (free.text[: end - length], "stop")
    assert done.token_ids == free.token_ids[:end]
    assert done.usage.completion_tokens == end


def test_processors_reach_the_model(engine: Engine) -> None:
    free = only(engine, ask("Hello"))
    banned = only(engine, ask("Hello", bad_words=((free.token_ids[0],),)))
    assert free.token_ids[0] not in banned.token_ids
    pair = only(engine, ask("Hello", bad_words=((free.token_ids[0], free.token_ids[1]),)))
    assert pair.token_ids[0] == free.token_ids[0]
    assert pair.token_ids[1] != free.token_ids[1]
    assert only(engine, ask("Hello", logit_bias=((40, 1e4),))).token_ids == (40,) * 12
    once = only(engine, ask("Hello", repetition_penalty=1e6, ignore_eos=True))
    assert len({*encode("Hello"), *once.token_ids}) == len(set("Hello")) + 12


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}, {"temperature": 1e-4}])
def test_a_sampling_filter_that_leaves_one_token_is_greedy(engine: Engine, filters: dict[str, float]) -> None:
    greedy = only(engine, ask("Hello"))
    assert only(engine, ask("Hello", **{"temperature": 1.0, **filters})).token_ids == greedy.token_ids


def test_seeds(engine: Engine) -> None:
    seeded = ask("Hello", temperature=1.5, seed=11, n=3)
    runs = engine.run([ask("x", name="x", temperature=1.0), seeded, ask("y", name="y", temperature=1.0)])
    again = engine.run([seeded])
    for index in range(3):
        alone = ask("Hello", temperature=1.5, seed=11 + index)
        assert runs.of("r", index).token_ids == again.of("r", index).token_ids == only(engine, alone).token_ids
    assert len({again.of("r", index).token_ids for index in range(3)}) == 3
    # Long enough that no two are equal by chance, whatever ran on this engine before.
    unseeded = [only(engine, ask("Hello", temperature=1.5, min_new_tokens=6)).token_ids for _ in range(4)]
    assert len(set(unseeded)) == 4


def test_one_who_takes_over_an_engine_gets_its_first_seeds(start: Start, llama: Path) -> None:
    """An engine that was closed is kept, and nothing of what it did shows."""
    unseeded = ask("Hello", temperature=1.5, min_new_tokens=6)
    drawn = []
    for _ in range(2):
        engine = start(llama, seed=5)
        drawn.append(only(engine, unseeded).token_ids)
        engine.close()
    assert drawn[0] == drawn[1]
