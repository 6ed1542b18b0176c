"""transformers' words, without transformers: what each field becomes, and what has no word."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.contract import DrafterSetup, EngineSetup, Refused, Request, SamplingParams
from harness.engines import ENGINES, recipes
from harness.engines.environments import TORCH, Pip
from harness.engines.transformers import RECIPE, SAMPLING, TransformersDialect
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

SETUP = EngineSetup(target=Path("/target"), context_length=128)
MODEL = DrafterSetup.chain("STANDALONE", 3, Path("/draft"))
LOOKUP = DrafterSetup.chain("NGRAM", 4, prompt_lookup_min=1, prompt_lookup_max=3)
REQUEST = Request(request_id="q", prompt_token_ids=(1, 2))
DIALECT = TransformersDialect()


def words(**changes: Any) -> dict[str, Any]:
    return DIALECT.start("5.24.0", replace(SETUP, **changes))


def asked(drafter: DrafterSetup | None = None, **sampling: Any) -> dict[str, Any]:
    request = replace(REQUEST, sampling=SamplingParams(**sampling))
    return DIALECT.request(request, replace(SETUP, drafter=drafter))


def test_one_engine_serves_all_who_load_the_same() -> None:
    """Sizes mean nothing to it, and how much is drafted is told with each request."""
    assert words(page_size=4, chunk_size=5, max_running=1, prefix_cache=False, context_length=9) == words()
    assert words(drafter=LOOKUP) == words()
    assert words(drafter=MODEL) == words(drafter=replace(MODEL, num_steps=5, num_draft_tokens=6)) != words()
    for name, value in (("dtype", "float64"), ("device", "cuda"), ("seed", 3), ("target", Path("/other"))):
        assert words(**{name: value}) != words(), name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("overlap", True),
        ("batch_buckets", (1, 2)),
        ("num_pages", 8),
        ("snapshots", True),
        ("kernels", "triton"),
        ("drafter.method", DrafterSetup.chain("EAGLE3", 3, Path("x"))),
        ("drafter.model", DrafterSetup.chain("STANDALONE", 3)),
        ("drafter.topk", DrafterSetup(method="STANDALONE", model=Path("x"), num_steps=2, topk=2, num_draft_tokens=4)),
        ("drafter.script", replace(MODEL, script=lambda *_: ())),
        ("drafter.model", replace(LOOKUP, model=Path("x"))),
        ("drafter.prompt_lookup_min=2", replace(LOOKUP, prompt_lookup_min=2)),
        ("drafter.prompt_lookup_max=0", replace(LOOKUP, prompt_lookup_max=0)),
        ("drafter.draft_sample_method", replace(LOOKUP, draft_sample_method="probabilistic")),
    ],
)
def test_a_setup_that_has_no_word_is_declined_by_name(field: str, value: Any) -> None:
    with pytest.raises(Refused, match=field):
        words(**{field.partition(".")[0]: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("arrival_step", 2),
        ("abort_step", 0),
        ("pooled_hidden", "both"),
        ("num_speculative_tokens", 0),
    ],
)
def test_a_request_that_has_no_word_is_declined_by_name(field: str, value: Any) -> None:
    with pytest.raises(Refused, match=f"request 'q': {field}="):
        DIALECT.request(replace(REQUEST, **{field: value}), SETUP)


@pytest.mark.parametrize(
    ("drafter", "sampling", "field"),
    [
        (None, {"presence_penalty": 0.5}, "presence_penalty"),
        (None, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (None, {"allowed_token_ids": (3,)}, "allowed_token_ids"),
        (None, {"json_schema": "{}"}, "json_schema"),
        (None, {"regex": "a*"}, "regex"),
        (None, {"stop": ("a",), "min_new_tokens": 2}, "min_new_tokens"),
        (LOOKUP, {"stop": ("a",), "min_new_tokens": 2}, "min_new_tokens"),
        (MODEL, {"stop": ("a",)}, "stop="),
        (MODEL, {"temperature": 1.0}, "draft_sample_method='probabilistic'"),
    ],
)
def test_sampling_that_has_no_word_is_declined_by_name(
    drafter: DrafterSetup | None, sampling: dict[str, Any], field: str
) -> None:
    with pytest.raises(Refused, match=f"request 'q': .*{field}"):
        asked(drafter, **sampling)


def test_a_request() -> None:
    told = asked(
        max_new_tokens=9, logit_bias=((3, 1.0), (4, 2.0), (3, 0.5)), bad_words=((4, 5),), stop=("x",), n=2, seed=7
    )
    assert (told["id"], told["prompt_token_ids"], told["n"], told["seed"]) == ("q", [1, 2], 2, 7)
    said = told["generate"]
    assert (said["max_new_tokens"], said["stop_strings"], said["do_sample"]) == (9, ["x"], False)
    assert (said["sequence_bias"], said["bad_words_ids"]) == ([[[3], 1.5], [[4], 2.0]], [[4, 5]])


def test_defaults_ask_for_nothing() -> None:
    said = asked()["generate"]
    optional = ("min_new_tokens", "stop_strings", "sequence_bias", "bad_words_ids")
    assert all(said[name] is None for name in optional)
    assert (said["do_sample"], said["repetition_penalty"], said["output_hidden_states"]) == (False, 1.0, False)


def test_a_sampled_request_names_every_filter() -> None:
    """Defaults of transformers would act otherwise: its `top_k` is 50."""
    said = asked(temperature=0.7, top_k=0)["generate"]
    assert (said["do_sample"], said["temperature"], said["top_k"], said["top_p"]) == (True, 0.7, 0, 1.0)


def test_how_much_is_drafted_is_told_with_a_request() -> None:
    assert (asked()["drafts"], asked(MODEL)["drafts"]) == (0, 3)
    assert "prompt_lookup_num_tokens" not in asked(MODEL)["generate"]
    said = asked(LOOKUP, temperature=1.0, stop=("a",))
    assert said["drafts"] == said["generate"]["prompt_lookup_num_tokens"] == 4
    assert said["generate"]["max_matching_ngram_size"] == 3


def test_claims_depend_on_the_drafter() -> None:
    plain = DIALECT.capabilities("5.24.0", SETUP)
    greedy = DIALECT.capabilities("5.24.0", replace(SETUP, drafter=MODEL))
    drawn = DIALECT.capabilities("5.24.0", replace(SETUP, drafter=replace(MODEL, draft_sample_method="probabilistic")))
    lookup = DIALECT.capabilities("5.24.0", replace(SETUP, drafter=LOOKUP))
    assert plain.features - greedy.features == {"stop"} | SAMPLING
    assert plain.features - drawn.features == {"stop"}
    assert plain.features == lookup.features
    assert plain.drafters == {"STANDALONE", "NGRAM"}
    assert (plain.engine, plain.version) == ("transformers", "5.24.0")


def test_it_runs_in_this_environment_unless_another_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ENGINES["transformers"].isolated
    assert recipes()["transformers"] is RECIPE
    assert RECIPE.python() == RECIPE.python(RECIPE.version) == Path(sys.executable)
    monkeypatch.setattr("harness.engines.environments.FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"draftproof engines install transformers 5\.0\.0"):
        RECIPE.python("5.0.0")
    first, second = RECIPE.steps("5.0.0")
    assert first == Pip((TORCH,))
    assert second == Pip(("transformers==5.0.0", TORCH))
