"""llama.cpp's words, without llama.cpp: what each field becomes, and what has no word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.contract import DrafterSetup, EngineSetup, Refused, Request, SamplingParams
from harness.engines.llama_cpp import LlamaCppDialect
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

SETUP = EngineSetup(target=Path("/target"), context_length=100, max_running=4)
DIALECT = LlamaCppDialect()


def words(**changes: Any) -> dict[str, Any]:
    return DIALECT.start("1", replace(SETUP, **changes))


def arguments(**changes: Any) -> dict[str, str]:
    said = words(**changes)["arguments"]
    return dict(zip(said[::2], said[1::2], strict=True))


def body(setup: EngineSetup = SETUP, **sampling: Any) -> dict[str, Any]:
    request = Request(request_id="q", prompt_token_ids=(1, 2), sampling=SamplingParams(**sampling))
    return dict(DIALECT.request(request, setup)["body"])


@pytest.mark.parametrize(
    ("method", "name"), [("STANDALONE", "draft-simple"), ("EAGLE3", "draft-eagle3"), ("DFLASH", "draft-dflash")]
)
def test_drafters_with_weights_by_their_names(method: str, name: str) -> None:
    drafter = DrafterSetup.chain(method, 3, Path("/draft"))
    said = arguments(drafter=drafter)
    assert (said["--spec-type"], said["--spec-draft-n-max"], said["--spec-draft-type-k"]) == (name, "3", "f32")
    assert words(drafter=drafter)["draft_model"] == "/draft"


def test_n_grams_have_one_length() -> None:
    said = arguments(drafter=DrafterSetup.chain("NGRAM", 4, prompt_lookup_min=2, prompt_lookup_max=3))
    assert said["--spec-type"] == "ngram-simple"
    assert (said["--spec-ngram-simple-size-n"], said["--spec-ngram-simple-size-m"]) == ("2", "4")


def test_each_slot_has_the_context_and_the_model_says_where_it_ends() -> None:
    """Caches hold multiples of 256 a slot."""
    said = arguments()
    assert (said["--parallel"], said["--ctx-size"]) == ("4", "1024")
    assert "llama.context_length=int:100" in said["--override-kv"]
    assert arguments(context_length=257)["--ctx-size"] == "2048"


def test_a_batch_holds_a_block_of_every_slot() -> None:
    assert arguments(chunk_size=3)["--batch-size"] == "4"
    drafting = {"chunk_size": 3, "drafter": DrafterSetup.chain("NGRAM", 7)}
    assert arguments(**drafting)["--batch-size"] == arguments(**drafting)["--ubatch-size"] == "32"
    assert arguments(chunk_size=64)["--batch-size"] == "64"


def test_kv_is_of_the_dtype() -> None:
    assert arguments()["--cache-type-k"] == arguments()["--cache-type-v"] == "f32"
    assert arguments(dtype="bfloat16")["--cache-type-k"] == "bf16"


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    assert "--cache-ram" not in arguments()
    assert arguments(prefix_cache=False)["--cache-ram"] == "0"
    assert body(replace(SETUP, prefix_cache=False))["cache_prompt"] is False


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_buckets", (4, 8)),
        ("snapshots", True),
        ("kernels", "triton"),
        ("dtype", "float64"),
        ("dtype", "float12"),
        ("device", "cuda"),
        ("page_size", 16),
        ("page_size", 0),
        ("num_pages", 9),
        ("overlap", True),
        ("chunk_size", 0),
        ("max_running", 0),
        ("context_length", 0),
        ("drafter", DrafterSetup.chain("EAGLE", 2, Path("/draft"))),
        ("drafter", DrafterSetup.chain("MTP", 2)),
        ("drafter", DrafterSetup(method="EAGLE3", model=Path("/d"), num_steps=2, topk=2, num_draft_tokens=5)),
        ("drafter", DrafterSetup.chain("EAGLE3", 2, Path("/d"), draft_sample_method="probabilistic")),
    ],
)
def test_what_has_no_word_is_declined_by_name(field: str, value: Any) -> None:
    with pytest.raises(Refused, match=field):
        words(**{field: value})


def test_a_request() -> None:
    said = body(max_new_tokens=9, logit_bias=((3, 1.0), (3, 0.5)), stop=("x",), n=2, seed=7, ignore_eos=True, top_k=4)
    assert said["prompt"] == [1, 2]
    assert (said["n_predict"], said["n_cmpl"], said["seed"], said["stop"]) == (9, 2, 7, ["x"])
    assert (said["logit_bias"], said["ignore_eos"], said["top_k"]) == ([[3, 1.5]], True, 4)


def test_filters_that_are_not_asked_for_are_off() -> None:
    """llama-server has others on by default."""
    said = body()
    assert (said["temperature"], said["top_k"], said["top_p"], said["min_p"]) == (0.0, 0, 1.0, 0.0)
    assert (said["repeat_penalty"], said["n_probs"]) == (1.0, 0)
    assert "seed" not in said


def test_the_repetition_penalty_looks_at_everything() -> None:
    assert body(repetition_penalty=1.5)["repeat_last_n"] == SETUP.context_length


@pytest.mark.parametrize("wanted", [0, 3])
def test_logprobs_of_all_tokens_are_asked_for_since_ranks_are_not_told(wanted: int) -> None:
    assert body(logprobs=wanted)["n_probs"] > 10_000


def test_a_schema_goes_out_as_json() -> None:
    assert body(json_schema='{"type": "integer"}')["json_schema"] == {"type": "integer"}
    with pytest.raises(Refused, match="json_schema"):
        body(json_schema="{")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_new_tokens", 1),
        ("stop_token_ids", (3,)),
        ("prompt_logprobs", 0),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("bad_words", ((3,),)),
        ("allowed_token_ids", (3,)),
        ("regex", "a"),
    ],
)
def test_sampling_that_has_no_word_is_declined_by_name(field: str, value: Any) -> None:
    with pytest.raises(Refused, match=field):
        body(**{field: value})
    assert field not in DIALECT.capabilities("1", SETUP).features


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("return_hidden_states", True),
        ("pooled_hidden", "both"),
        ("num_speculative_tokens", 0),
        ("arrival_step", 2),
        ("abort_step", 2),
    ],
)
def test_a_request_that_has_no_word_is_declined_by_name(field: str, value: Any) -> None:
    request = replace(Request(request_id="q", prompt_token_ids=(1,)), **{field: value})
    with pytest.raises(Refused, match=field):
        DIALECT.request(request, SETUP)
    assert field not in DIALECT.capabilities("1", SETUP).features
