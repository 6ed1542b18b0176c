"""How SGLang is spoken to, and what is declined for it without asking. None of it needs SGLang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.contract import DrafterSetup, EngineSetup, Refused, Request, SamplingParams
from harness.engines import ENGINES, recipes
from harness.engines.environments import RequirementsOf
from harness.engines.sglang import FEATURES, RECIPE, SglangDialect
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

SETUP = EngineSetup(target=Path("target"), context_length=100, max_running=4)
EAGLE = DrafterSetup.chain("EAGLE", 3, Path("eagle"))
REQUEST = Request(request_id="q", prompt_token_ids=(5, 6))
SAYS = SglangDialect()


def words(**changes: Any) -> dict[str, Any]:
    return SAYS.start(RECIPE.version, replace(SETUP, **changes))


def asked(**sampling: Any) -> dict[str, Any]:
    return SAYS.request(replace(REQUEST, sampling=SamplingParams(**sampling)), SETUP)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_buckets", (4,)),
        ("snapshots", True),
        ("kernels", "torch"),
        ("dtype", "float64"),
        ("device", "cuda"),
        ("num_pages", -1),
        ("chunk_size", 0),
        ("page_size", 0),
        ("drafter", DrafterSetup.chain("MEDUSA", 3, Path("medusa"))),
        ("drafter", replace(EAGLE, draft_sample_method="probabilistic")),
    ],
)
def test_a_setup_it_has_no_word_for_is_declined_by_its_field(field: str, value: Any) -> None:
    with pytest.raises(Refused, match=field):
        words(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 0),
        ("repetition_penalty", 1.5),
        ("bad_words", ((3,),)),
        ("allowed_token_ids", (3,)),
    ],
)
def test_a_sampling_field_it_has_not_is_declined(field: str, value: Any) -> None:
    assert field not in FEATURES
    with pytest.raises(Refused, match=f"'q': {field}="):
        asked(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("pooled_hidden", "both"), ("num_speculative_tokens", 0)])
def test_a_request_field_it_has_not_is_declined(field: str, value: Any) -> None:
    with pytest.raises(Refused, match=field):
        SAYS.request(replace(REQUEST, **{field: value}), SETUP)


def test_defaults_ask_for_nothing() -> None:
    sampling = asked()["generate"]["sampling_params"]
    assert (sampling["temperature"], sampling["top_k"], sampling["top_p"], sampling["min_p"]) == (0.0, -1, 1.0, 0.0)
    assert all(sampling[name] is None for name in ("stop", "stop_token_ids", "logit_bias", "regex", "json_schema"))


def test_biases_of_one_token_add_up() -> None:
    bias = asked(logit_bias=((3, 1.0), (4, 2.0), (3, 0.5)))["generate"]["sampling_params"]["logit_bias"]
    assert bias == {"3": 1.5, "4": 2.0}


def test_answers_are_streamed_where_a_grammar_may_end_them() -> None:
    assert asked(regex="a")["generate"]["stream"]
    assert asked(json_schema="{}")["generate"]["stream"]
    assert not asked()["generate"]["stream"]


def test_without_a_drafter_its_own_attention_runs() -> None:
    assert words()["attention_backend"] == "torch_native"
    assert not any(name.startswith("speculative") for name in words())
    assert words(drafter=EAGLE)["attention_backend"] == "intel_amx"


def test_drafters() -> None:
    chain = words(drafter=EAGLE)
    assert chain["speculative_algorithm"] == "EAGLE"
    assert chain["speculative_draft_model_path"] == "eagle"
    assert (chain["speculative_num_steps"], chain["speculative_eagle_topk"]) == (3, 1)
    assert chain["speculative_num_draft_tokens"] == 4
    ngram = words(drafter=DrafterSetup.chain("NGRAM", 3))
    assert ngram["speculative_num_draft_tokens"] == 4
    assert "speculative_num_steps" not in ngram


def test_pages() -> None:
    assert (words()["page_size"], words(drafter=EAGLE)["page_size"]) == (16, 1)
    small = words(page_size=4, num_pages=10)
    assert (small["page_size"], small["max_total_tokens"]) == (4, 44)
    assert words(drafter=EAGLE, num_pages=10)["max_total_tokens"] == 161
    assert (words(chunk_size=12)["page_size"], words(chunk_size=5)["page_size"]) == (4, 1)
    assert words()["max_total_tokens"] >= SETUP.max_running * SETUP.context_length
    with pytest.raises(Refused, match="page_size"):
        words(drafter=EAGLE, page_size=4)


def test_what_no_cpu_has_with_drafts_is_not_claimed() -> None:
    assert SAYS.capabilities("", SETUP).features - SAYS.capabilities("", replace(SETUP, drafter=EAGLE)).features == {
        "overlap",
        "page_size",
    }
    assert not words(overlap=True)["disable_overlap_schedule"]
    with pytest.raises(Refused, match="overlap"):
        words(drafter=EAGLE, overlap=True)


def test_one_engine_serves_all_who_ask_for_room() -> None:
    assert words(max_running=8) == words(max_running=12)
    assert words(max_running=3)["max_running_requests"] == 3


def test_equal_words_mean_equal_engines() -> None:
    """The prompt cache and the seed are SGLang's, poison is not."""
    assert words() == words(poison=False)
    assert words() != words(prefix_cache=False)
    assert words() != words(seed=1)


def test_what_it_claims() -> None:
    claims = SAYS.capabilities("0.5.23", replace(SETUP, drafter=EAGLE))
    assert claims.drafters == {"STANDALONE", "EAGLE", "EAGLE3", "NGRAM"}
    assert not claims.grey_box
    known = {
        "greedy_n",
        *SamplingParams.__dataclass_fields__,
        *Request.__dataclass_fields__,
        *EngineSetup.__dataclass_fields__,
    }
    assert claims.features <= known


def test_its_environment_is_pinned_and_its_own() -> None:
    assert ENGINES["sglang"].isolated
    assert recipes()["sglang"] is RECIPE
    steps = RECIPE.steps(RECIPE.version)
    assert not any(isinstance(step, RequirementsOf) for step in steps)
    packages = [package for step in steps if not isinstance(step, RequirementsOf) for package in step.packages]
    assert {"sglang==0.5.23", "torch==2.13.0", "transformers==5.19.0"} <= set(packages)
