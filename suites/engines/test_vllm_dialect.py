"""vLLM's words, without vLLM: what each field becomes, and what has no word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.contract import DrafterSetup, EngineSetup, Refused, Request, SamplingParams
from harness.engines.vllm import VllmDialect
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

SETUP = EngineSetup(target=Path("/target"), context_length=128)
DIALECT = VllmDialect()


def words(**changes: Any) -> dict[str, Any]:
    return DIALECT.start("0.32.0", replace(SETUP, **changes))


@pytest.mark.parametrize(
    ("method", "name", "model"),
    [
        ("STANDALONE", "draft_model", Path("/draft")),
        ("EAGLE", "eagle", Path("/draft")),
        ("EAGLE3", "eagle3", Path("/draft")),
        ("MEDUSA", "medusa", Path("/draft")),
        ("DFLASH", "dflash", Path("/draft")),
        ("MTP", "mtp", None),
        ("NGRAM", "ngram", None),
    ],
)
def test_drafters_by_their_names(method: str, name: str, model: Path | None) -> None:
    speculative = words(drafter=DrafterSetup.chain(method, 3, model))["speculative_config"]
    assert (speculative["method"], speculative["num_speculative_tokens"]) == (name, 3)
    assert speculative.get("model") == (model and str(model))


@pytest.mark.parametrize("drafter", [None, DrafterSetup.chain("MTP", 3)])
def test_code_beside_a_checkpoint_is_trusted_with_a_drafter_and_without(
    tmp_path: Path, drafter: DrafterSetup | None
) -> None:
    assert not words(target=tmp_path, drafter=drafter)["trust_remote_code"]
    (tmp_path / "configuration_made_up.py").touch()
    assert words(target=tmp_path, drafter=drafter)["trust_remote_code"]


def test_drafts_that_are_drawn_are_asked_for() -> None:
    drawn = DrafterSetup.chain("EAGLE", 2, Path("/draft"), draft_sample_method="probabilistic")
    assert words(drafter=drawn)["speculative_config"]["draft_sample_method"] == "probabilistic"


def test_sizes() -> None:
    told = words(page_size=64, num_pages=9, chunk_size=5, prefix_cache=False, overlap=True)
    assert (told["block_size"], told["num_gpu_blocks_override"]) == (64, 9)
    assert told["long_prefill_token_threshold"] == 5
    assert (told["enable_prefix_caching"], told["async_scheduling"]) == (False, True)


def test_a_few_running_requests_are_a_limit_and_many_are_room() -> None:
    assert words(max_running=1)["max_num_seqs"] == 1
    assert words(max_running=8) == words(max_running=20)


def test_pages_are_enough_for_every_request_with_its_drafts() -> None:
    told = words(drafter=DrafterSetup.chain("NGRAM", 7))
    assert told["num_gpu_blocks_override"] > told["max_num_seqs"] * (128 + 7) / told["block_size"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_buckets", (4, 8)),
        ("snapshots", True),
        ("kernels", "triton"),
        ("dtype", "float64"),
        ("drafter", DrafterSetup.chain("FROZEN_KV_MTP", 2)),
        ("drafter", DrafterSetup(method="EAGLE", model=Path("/draft"), num_steps=2, topk=2, num_draft_tokens=5)),
    ],
)
def test_what_has_no_word_is_declined_by_name(field: str, value: Any) -> None:
    with pytest.raises(Refused, match=field):
        words(**{field: value})


def test_a_request() -> None:
    sampling = SamplingParams(
        max_new_tokens=9, logit_bias=((3, 1.0), (3, 0.5)), bad_words=((4, 5),), regex="a+", stop=("x",), n=2, seed=7
    )
    told = DIALECT.request(Request(request_id="q", prompt_token_ids=(1, 2), sampling=sampling, abort_step=4), SETUP)
    assert (told["id"], told["prompt_token_ids"], told["abort_step"]) == ("q", [1, 2], 4)
    said = told["sampling"]
    assert (said["max_tokens"], said["n"], said["seed"], said["stop"]) == (9, 2, 7, ["x"])
    assert (said["bias"], said["bad_word_ids"], said["grammar"]) == ([(3, 1.5)], [[4, 5]], {"regex": "a+"})


@pytest.mark.parametrize(
    ("field", "value"), [("return_hidden_states", True), ("pooled_hidden", "both"), ("num_speculative_tokens", 0)]
)
def test_a_request_that_has_no_word_is_declined_by_name(field: str, value: Any) -> None:
    request = replace(Request(request_id="q", prompt_token_ids=(1,)), **{field: value})
    with pytest.raises(Refused, match=field):
        DIALECT.request(request, SETUP)


def test_claims_depend_on_the_drafter() -> None:
    plain = DIALECT.capabilities("0.32.0", SETUP)
    drafting = DIALECT.capabilities("0.32.0", replace(SETUP, drafter=DrafterSetup.chain("NGRAM", 2)))
    assert plain.features - drafting.features == {"min_p", "logit_bias"}
    assert (plain.engine, plain.version) == ("vllm", "0.32.0")
