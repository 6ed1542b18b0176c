"""What a file says of a server, in the server's words, without a server: commands, requests, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.contract import DrafterSetup, EngineSetup, Refused, Request, SamplingParams
from harness.engines import engine_factory, server_file
from harness.engines.openai import OpenAIDialect
from harness.engines.server_file import presets, read
from suites.engines.openai.arrange import filled
from suites.registration import suite

suite(seconds=0.3, stage="cpu", needs="cpu")

SETUP = EngineSetup(target=Path("/target"), context_length=128)
PRESETS = sorted(presets())
PYTHON = Path("/env/bin/python")


def dialect(preset: str = "vllm") -> OpenAIDialect:
    return OpenAIDialect(read(presets()[preset]), server_file.FOLDER, PYTHON)


def command(preset: str = "vllm", **changes: Any) -> list[str]:
    """The command as the worker fills it in."""
    words = dialect(preset).start("", replace(SETUP, **changes))
    return filled(words["command"], {**words["places"], "port": "8000"})


def body(preset: str = "vllm", **sampling: Any) -> dict[str, Any]:
    request = Request(request_id="q", prompt_token_ids=(1, 2), sampling=SamplingParams(**sampling))
    told: dict[str, Any] = dialect(preset).request(request, SETUP)["body"]
    return told


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_leaves_no_place_open(preset: str) -> None:
    for method, drafter in read(presets()[preset]).drafters.items():
        del drafter
        model = None if method in ("NGRAM", "MTP") else Path("/draft")
        told = command(preset, drafter=DrafterSetup.chain(method, 3, model))
        assert not [part for part in told if server_file.PLACE.search(part)]
        assert "8000" in told
        assert (str(model) in "".join(told)) == (model is not None)


def test_a_drafter_in_the_words_of_vllm() -> None:
    drawn = DrafterSetup.chain("STANDALONE", 3, Path("/draft"), draft_sample_method="probabilistic")
    assert command(drafter=drawn)[-1] == (
        '{"method": "draft_model", "model": "/draft", "num_speculative_tokens": 3, '
        '"draft_sample_method": "probabilistic"}'
    )


def test_switches_and_what_differs_from_the_defaults() -> None:
    told = " ".join(command(prefix_cache=False, overlap=True, seed=7))
    for part in (
        "/env/bin/python -s -m",
        "--model /target --dtype float32 --max-model-len 128",
        "--no-enable-prefix-caching",
        "--async-scheduling",
        "--seed 7",
    ):
        assert part in told
    assert "--seed" not in command()


@pytest.mark.parametrize(
    ("changes", "size"),
    [({"chunk_size": 5}, "5"), ({"chunk_size": 5, "drafter": 7}, "8"), ({"chunk_size": 200}, "128")],
)
def test_a_chunk_holds_a_block_and_fits_the_context(tmp_path: Path, changes: dict[str, Any], size: str) -> None:
    file = f"""{STARTS}, "{{dtype}}", "{{context_length}}", "{{chunk_size}}"]\n[drafters.NGRAM]\narguments = []"""
    here = OpenAIDialect(read(written(tmp_path, file)), tmp_path, PYTHON)
    if "drafter" in changes:
        changes = {**changes, "drafter": DrafterSetup.chain("NGRAM", changes["drafter"])}
    assert here.start("", replace(SETUP, **changes))["places"]["chunk_size"] == size


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_buckets", (4, 8)),
        ("snapshots", True),
        ("kernels", "triton"),
        ("dtype", "float64"),
        ("num_pages", 9),
        ("page_size", 16),
        ("device", "cuda"),
        ("chunk_size", 0),
        ("max_running", 0),
        ("drafter", DrafterSetup.chain("FROZEN_KV_MTP", 2)),
        ("topk", DrafterSetup(method="EAGLE", model=Path("/draft"), num_steps=2, topk=2, num_draft_tokens=5)),
        ("draft_sample_method", DrafterSetup.chain("NGRAM", 2, draft_sample_method="probabilistic")),
    ],
)
def test_what_the_file_does_not_name_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(Refused, match=field):
        command(**{"drafter" if isinstance(value, DrafterSetup) else field: value})


def test_a_request_says_what_differs_from_the_defaults() -> None:
    assert body() == {
        "max_tokens": 16,
        "temperature": 0.0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    told = body(
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        seed=7,
        n=2,
        max_new_tokens=9,
        min_new_tokens=2,
        stop=("x",),
        stop_token_ids=(5,),
        logit_bias=((3, 1.0), (3, 0.5)),
        regex="a+",
        logprobs=2,
        prompt_logprobs=0,
        presence_penalty=0.5,
        ignore_eos=True,
    )
    assert (told["temperature"], told["top_p"], told["top_k"], told["seed"], told["n"]) == (0.5, 0.9, 4, 7, 2)
    assert (told["max_tokens"], told["min_tokens"], told["stop"], told["stop_token_ids"]) == (9, 2, ["x"], [5])
    assert (told["logit_bias"], told["structured_outputs"]) == ({"3": 1.5}, {"regex": "a+"})
    assert (told["logprobs"], told["prompt_logprobs"], told["presence_penalty"]) == (2, 0, 0.5)


def test_bad_words_go_as_text() -> None:
    request = Request(request_id="q", prompt_token_ids=(1,), sampling=SamplingParams(bad_words=((4, 5),)))
    assert dialect().request(request, SETUP)["as_text"] == {"bad_words": [[4, 5]]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("return_hidden_states", True),
        ("pooled_hidden", "both"),
        ("num_speculative_tokens", 0),
        ("arrival_step", 2),
        ("abort_step", 3),
    ],
)
def test_what_completions_have_no_field_for_is_refused_by_name(field: str, value: Any) -> None:
    request = replace(Request(request_id="q", prompt_token_ids=(1,)), **{field: value})
    with pytest.raises(Refused, match=field):
        dialect().request(request, SETUP)


def test_claims_are_what_the_file_names() -> None:
    plain = dialect().capabilities("0.32.0", SETUP)
    drafting = dialect().capabilities("0.32.0", replace(SETUP, drafter=DrafterSetup.chain("EAGLE", 2, Path("/d"))))
    assert plain.features - drafting.features == {"min_p", "logit_bias"}
    assert {"overlap", "prefix_cache"} <= plain.features
    assert not {"arrival_step", "abort_step", "num_pages", "chunk_size", "return_hidden_states"} & plain.features


@pytest.mark.parametrize(("method", "listed"), [("EAGLE", True), ("NGRAM", False)])
def test_verify_steps_are_read_of_drafters_that_always_draft(method: str, listed: bool) -> None:
    setup = replace(SETUP, drafter=DrafterSetup.chain(method, 2, Path("/d")))
    words = dialect().start("", setup)
    assert (words["form"]["accepted"] != "", words["counters"] != {}) == (listed, listed)
    assert dialect().capabilities("0.32.0", setup).tells_acceptance == listed


def written(folder: Path, text: str) -> Path:
    path = folder / "server.toml"
    path.write_text(text, encoding="utf-8")
    return path


STARTS = 'command = ["serve", "{target}", "--port", "{port}"'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ids = 3", "Expected `str`, got `int`"),
        ("tempo = 3", "unknown field `tempo`"),
        ("", "give either a command that starts a server, or the address"),
        ('address = "http://127.0.0.1:1"', r"an address goes with \[serves\]"),
        ('command = ["serve"]', r"must name \{target\} and \{port\}"),
        (f'{STARTS}, "{{model}}"]', r"command: there is no place \{model\}"),
        (f"{STARTS}]\n[fields]\nwidth = []", "fields.width: must be one of page_size"),
        (f'{STARTS}]\n[request]\nwarmth = "t"', "request.warmth: must be one of"),
        (f'{STARTS}]\n[drafters.EAGLE]\narguments = ["{{draft}}"]', r"drafters.EAGLE: there is no place \{draft\}"),
        (f'{STARTS}]\n[semantics]\ndead_end = "waits"', "Invalid enum value"),
    ],
)
def test_a_file_that_is_wrong_is_told_with_its_field(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read(written(tmp_path, text))


def test_the_files_of_the_docs_are_right(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "servers.md").read_text(encoding="utf-8")
    started, running = (read(written(tmp_path, part.partition("```")[0])) for part in text.split("```toml")[1:])
    assert started.drafters.keys() == {"STANDALONE"}
    assert running.serves is not None
    assert running.serves.target == "build/known/target"
    for field in msgspec.structs.fields(started):
        assert f"`{field.name}`" in text or f"[{field.name}" in text or f"{field.name} =" in text, field.name


def test_a_server_must_be_named() -> None:
    for spec in ("openai", "openai@nobody"):
        with pytest.raises(ValueError, match=r"name a server: .*openai@vllm, or openai@FILE\.toml"):
            engine_factory(spec)
    with pytest.raises(ValueError, match=r"no-such\.toml: .*No such file"):
        engine_factory("openai@no-such.toml")


def test_the_environment_of_another_engine_must_be_there() -> None:
    with pytest.raises(ValueError, match=r"draftproof engines install vllm 0\.1"):
        engine_factory("openai@vllm@0.1")
